"""The search for block sizes of pallas_flash, with a fake estimator and with one real estimate from libtpu."""

import json
import sys
from pathlib import Path

import pytest
from expecting import error

pytest.importorskip("jax")

from vitkernels.attention.pallas_flash.tpu import block_plans
from vitkernels.attention.pallas_flash.tpu.block_plans import PassBlocks
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import chips, compiler, tune

PROBLEM = tune.plain_problem((2, 16, 1025, 64))
BEST = {"forward": PassBlocks(4, 256, 384), "backward": PassBlocks(2, 384, 256)}


def fake_ms(pass_name: str, blocks: PassBlocks) -> float:
    """Return 1 ms at the best blocks of a pass, and more for every size that differs."""
    best = BEST[pass_name]
    return 1.0 + sum(0.5 for name in ("heads", "queries", "keys") if getattr(blocks, name) != getattr(best, name))


def search(estimate):
    lines = []
    return tune.search(PROBLEM, estimate, lines.append), lines


def test_search__finds_best_blocks_in_best_form():
    found, lines = search(lambda form, pass_name, blocks: 5.0 if form == "single_pass" else fake_ms(pass_name, blocks))
    assert block_plans.rule(PROBLEM).form == "single_pass"
    assert (found.plan.form, found.plan.forward, found.plan.backward) == ("online_softmax", *BEST.values())
    assert found.ms == {"forward": 1.0, "backward": 1.0} and found.rule_ms == {"forward": 5.0, "backward": 5.0}
    assert len(lines) == len(set(lines)), "nothing is estimated twice"


def test_search__skips_and_reports_blocks_that_do_not_compile():
    def estimate(form, pass_name, blocks):
        if form == "online_softmax" and blocks.keys == 384:
            raise UsageError("out of VMEM")
        return 5.0 if form == "single_pass" else fake_ms(pass_name, blocks)

    found, lines = search(estimate)
    assert found.plan.forward.keys != 384 and found.plan.backward == BEST["backward"]
    assert any("out of VMEM" in line for line in lines)


@pytest.mark.parametrize(("gain", "form"), [(0.05, "single_pass"), (0.2, "online_softmax")])
def test_search__another_form_must_be_significantly_better(gain, form):
    found, _ = search(lambda form, pass_name, blocks: 1.0 if form == "single_pass" else 1.0 - gain)
    assert found.plan.form == form
    assert (found.plan == found.rule) == (form == "single_pass")


def test_search__passes_are_decided_separately():
    def estimate(form, pass_name, blocks):
        better = {"forward": 0.95, "backward": 0.8}[pass_name]
        return 9.0 if form == "online_softmax" else better if blocks.queries == 384 else 1.0

    found, lines = search(estimate)
    assert found.plan.forward == found.rule.forward and found.plan.backward.queries == 384
    assert found.plan.source == "table" and found.best["single_pass"][1] == {"forward": 0.95, "backward": 0.8}
    assert sum(line.startswith("online_softmax") for line in lines) == 2, "a form far behind is not searched"
    assert found.ms == {"forward": 1.0, "backward": 0.8}


def test_search__rule_that_does_not_compile():
    def estimate(form, pass_name, blocks):
        raise UsageError("no")

    with error("tpu_estimate.no_baseline"):
        search(estimate)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_tpu_report__tune_writes_the_table(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import tpu_report as script

    monkeypatch.delitem(sys.modules, "tpu_report")
    table = tmp_path / "table.json"
    fake_estimator = lambda form, pass_name, blocks: 5.0 if form == "single_pass" else fake_ms(pass_name, blocks)  # noqa: E731
    monkeypatch.setattr(tune, "libtpu_estimator", lambda problem, chip: fake_estimator)
    script.main(["--tune", "chip=v6e", "--shapes", "2,16,1025,64", "--table", str(table)])
    printed = capsys.readouterr().out
    assert "ESTIMATE" in printed and "NOT VALIDATED for v6e" in printed and f"written: {table}" in printed
    (entry,) = json.loads(table.read_text())["entries"]
    assert entry["chip"] == "v6e" and entry["estimate_ms"]["forward"] < entry["estimate_ms_by_rule"]["forward"]
    monkeypatch.setattr(block_plans, "TABLE", table)
    for chip, source in (("v6e", "table"), ("v5e", "rule")):
        problem = tune.replace(tune.plain_problem((1, 16, 1025, 64)), chip=chip)
        assert block_plans.plan(problem).source == source

    # A later search that finds nothing better removes the entry.
    monkeypatch.setattr(tune, "libtpu_estimator", lambda problem, chip: lambda form, pass_name, blocks: 1.0)
    script.main(["--tune", "chip=v6e", "--shapes", "2,16,1025,64", "--table", str(table)])
    assert "no entry" in capsys.readouterr().out and json.loads(table.read_text())["entries"] == []


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
@pytest.mark.parametrize(
    ("form", "pass_name", "blocks"),
    [("single_pass", "forward", PassBlocks(2, 128, 128)), ("online_softmax", "backward", PassBlocks(2, 128, 128))],
)
def test_libtpu_estimator__within_bounds(form, pass_name, blocks):
    problem = tune.plain_problem((2, 2, 128, 64))
    ms = tune.libtpu_estimator(problem, chips.chip("v5e"))(form, pass_name, blocks)
    read_and_written = 2 * 128 * 128 * 2 * (4 if pass_name == "forward" else 8)
    assert read_and_written / 819e9 * 1e3 / 2 < ms < 0.05
