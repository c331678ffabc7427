"""The search for pallas_flash's blocks: by a stand-in for the estimate, and one real estimate from libtpu."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from vitkernels.attention.pallas_flash.tpu import block_plans
from vitkernels.attention.pallas_flash.tpu.block_plans import PassBlocks
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import chips, compiler, tune

PROBLEM = tune.problem((2, 16, 1025, 64))
BEST = {"forward": PassBlocks(4, 256, 384), "backward": PassBlocks(2, 384, 256)}


def away(which: str, blocks: PassBlocks) -> float:
    """1 ms at the best blocks of a pass, more with every size that differs."""
    best = BEST[which]
    return 1.0 + sum(0.5 for name in ("heads", "queries", "keys") if getattr(blocks, name) != getattr(best, name))


def search(estimate):
    told = []
    return tune.search(PROBLEM, estimate, told.append), told


def test_the_least_estimate_is_found_in_the_form_that_has_it():
    found, told = search(lambda form, which, blocks: 5.0 if form == "single_pass" else away(which, blocks))
    assert block_plans.rule(PROBLEM).form == "single_pass"
    assert (found.plan.form, found.plan.forward, found.plan.backward) == ("online_softmax", *BEST.values())
    assert found.ms == {"forward": 1.0, "backward": 1.0} and found.rule_ms == {"forward": 5.0, "backward": 5.0}
    assert len(told) == len(set(told)), "nothing is estimated twice"


def test_what_does_not_compile_is_passed_over_and_told():
    def estimate(form, which, blocks):
        if form == "online_softmax" and blocks.keys == 384:
            raise UsageError("out of VMEM")
        return 5.0 if form == "single_pass" else away(which, blocks)

    found, told = search(estimate)
    assert found.plan.forward.keys != 384 and found.plan.backward == BEST["backward"]
    assert any("out of VMEM" in line for line in told)


@pytest.mark.parametrize(("gain", "form"), [(0.05, "single_pass"), (0.2, "online_softmax")])
def test_a_form_must_be_clearly_better_than_the_rule_s(gain, form):
    found, _ = search(lambda form, which, blocks: 1.0 if form == "single_pass" else 1.0 - gain)
    assert found.plan.form == form
    assert (found.plan == found.rule) == (form == "single_pass")


def test_each_pass_leaves_the_rule_by_itself():
    def estimate(form, which, blocks):
        better = {"forward": 0.95, "backward": 0.8}[which]
        return 9.0 if form == "online_softmax" else better if blocks.queries == 384 else 1.0

    found, told = search(estimate)
    assert found.plan.forward == found.rule.forward and found.plan.backward.queries == 384
    assert found.plan.source == "table" and found.best["single_pass"][1] == {"forward": 0.95, "backward": 0.8}
    assert sum(line.startswith("online_softmax") for line in told) == 2, "a form that begins far behind is not searched"
    assert found.ms == {"forward": 1.0, "backward": 0.8}


def test_nothing_to_compare_with_is_an_error():
    def estimate(form, which, blocks):
        raise UsageError("no")

    with pytest.raises(UsageError, match="rule's own blocks do not compile"):
        search(estimate)


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
def test_the_command_writes_a_table_that_the_kernels_read(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import tpu_report as script

    monkeypatch.delitem(sys.modules, "tpu_report")
    table = tmp_path / "table.json"
    stand_in = lambda form, which, blocks: 5.0 if form == "single_pass" else away(which, blocks)  # noqa: E731
    monkeypatch.setattr(tune, "libtpu_estimate", lambda of, chip: stand_in)
    script.main(["--tune", "chip=v6e", "--shapes", "2,16,1025,64", "--table", str(table)])
    printed = capsys.readouterr().out
    assert "ESTIMATE" in printed and "NOT VALIDATED for v6e" in printed and f"written: {table}" in printed
    (entry,) = json.loads(table.read_text())["entries"]
    assert entry["chip"] == "v6e" and entry["estimate_ms"]["forward"] < entry["estimate_ms_by_rule"]["forward"]
    monkeypatch.setattr(block_plans, "TABLE", table)
    for chip, source in (("v6e", "table"), ("v5e", "rule")):
        problem = tune.replace(tune.problem((1, 16, 1025, 64)), chip=chip)
        assert block_plans.plan(problem).source == source

    # A later search that finds nothing better takes the entry out again.
    monkeypatch.setattr(tune, "libtpu_estimate", lambda of, chip: lambda form, which, blocks: 1.0)
    script.main(["--tune", "chip=v6e", "--shapes", "2,16,1025,64", "--table", str(table)])
    assert "the rule, which answers" in capsys.readouterr().out and json.loads(table.read_text())["entries"] == []


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
@pytest.mark.parametrize(
    ("form", "which", "blocks"),
    [("single_pass", "forward", PassBlocks(2, 128, 128)), ("online_softmax", "backward", PassBlocks(2, 128, 128))],
)
def test_libtpu_s_estimate(form, which, blocks):
    of = tune.problem((2, 2, 128, 64))
    ms = tune.libtpu_estimate(of, chips.chip("v5e"))(form, which, blocks)
    read_and_written = 2 * 128 * 128 * 2 * (4 if which == "forward" else 8)
    assert read_and_written / 819e9 * 1e3 / 2 < ms < 0.05
