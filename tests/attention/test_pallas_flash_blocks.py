"""Which form and blocks pallas_flash runs in on a TPU: its rule, or the table of what a search found better."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("jax")

import jax

from vitkernels import attention
from vitkernels.attention.pallas_flash.tpu import attend, blocks
from vitkernels.attention.pallas_flash.tpu.tiles import Problem
from vitkernels.bridge import lazy_target, pallas_op
from vitkernels.errors import UsageError

PROBLEM = Problem(1, 4, 64, 200, 200, 0.125, False, "bfloat16", None, None, False, chip="v5e")
# Another form than the rule's, and heads grouped in another way forward than backward.
ENTRY = {
    "chip": "v5e",
    "dtype": "bfloat16",
    "heads": 4,
    "head_dim": 64,
    "q_tokens": 200,
    "kv_tokens": 200,
    "form": "long",
    "forward": {"heads": 2, "queries": 128, "keys": 256},
    "backward": {"heads": 4, "queries": 256, "keys": 128},
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that makes these entries the table."""

    def write(*entries):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"entries": entries}))
        monkeypatch.setattr(blocks, "TABLE", path)

    return write


def test_the_table_counts_for_its_chip_and_problem_alone(table):
    table(ENTRY)
    found = blocks.plan(PROBLEM)
    assert (found.form, found.forward, found.backward) == (
        "long",
        blocks.Blocks(2, 128, 256),
        blocks.Blocks(4, 256, 128),
    )
    assert "by table" in str(found)
    others = [{"chip": "v6e"}, {"chip": None}, {"q_tokens": 201}, {"dtype": "float32"}, {"is_causal": True}]
    for other in (*others, {"segments": True}, {"bias": (1, 1, 200, 200)}):
        assert blocks.plan(replace(PROBLEM, **other)).source == "rule"
    assert blocks.rule(PROBLEM).form == "short"
    table()
    assert blocks.plan(PROBLEM) == blocks.rule(PROBLEM)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_a_changed_entry_changes_the_kernels_and_not_the_result(table, passes):
    torch.manual_seed(0)
    qkv = torch.randn(1, 200, 768).bfloat16()
    static = {"heads": 4, "scale": 0.125, "is_causal": False, "extras": (), "bias_gradient": False, "chip": "v5e"}

    def outputs():  # of a new function each time: JAX keeps traces
        shape = jax.ShapeDtypeStruct((1, 200, 768), "bfloat16")
        return jax.eval_shape(lambda qkv: attend.attend(qkv, **static), shape)

    table()
    assert outputs().shape == (1, 200, 256)
    table(ENTRY)
    _, log_sum_exps = outputs()
    assert log_sum_exps.shape == (1, 2, 1, 2, 200), "two groups of two heads"
    op = pallas_op(attend.attend, vjp=attend.attend_vjp, name=f"tabled_{passes}")
    exact = qkv.double().unflatten(2, (3, 4, 64)).requires_grad_()
    expected = attention.get("native").qkvpacked(exact)
    ours = qkv.requires_grad_()
    out = op(ours, **static)[0]
    if passes == "forward":
        found, wanted = out, expected
    else:
        (found,) = torch.autograd.grad(out.double().square().sum(), ours)
        wanted = torch.autograd.grad(expected.square().sum(), exact)[0].flatten(2)
    # bfloat16 rounds probabilities, results and their gradient: 2e-3 each.
    assert (found.double() - wanted).norm() < 1e-2 * wanted.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"form": "wide"}, "form is 'short' or 'long', not 'wide'"),
        ({"forward": {"heads": 3, "queries": 128, "keys": 128}}, "heads, 3, must divide the 4 heads"),
        ({"forward": {"heads": 1, "queries": 128, "keys": 128}}, "fill whole tiles of 128 lanes"),
        ({"backward": {"heads": 2, "queries": 100, "keys": 128}}, "queries, 100, must be a multiple of 128"),
        ({"backward": {"heads": 2, "queries": 128, "keys": 0}}, "positive integers"),
        ({"form": "short"}, "all 200 keys at once, not 128"),
        ({"forward": {"heads": 2, "queries": 128}}, "keys"),
    ],
)
def test_a_bad_entry_is_refused_with_its_place_and_the_mend(table, change, message):
    table(ENTRY | change)
    with pytest.raises(UsageError, match=message) as error:
        blocks.plan(PROBLEM)
    assert str(blocks.TABLE) in str(error.value) and "--tune" in str(error.value)


def test_the_shipped_table_can_be_read_and_says_that_it_is_estimated():
    table = json.loads(blocks.TABLE.read_text())
    assert "ESTIMATE" in table["label"]
    assert blocks.plan(replace(PROBLEM, q_tokens=7, kv_tokens=7)).source == "rule"  # reading refuses a bad entry
    for entry in table["entries"]:
        times, by_rule = entry["estimate_ms"], entry["estimate_ms_by_rule"]
        assert sum(times.values()) < sum(by_rule.values())


def test_writing_replaces_the_entry_of_the_same_problem(table):
    table(ENTRY)
    blocks.plan(PROBLEM)
    blocks.write(ENTRY | {"forward": {"heads": 4, "queries": 256, "keys": 256}}, blocks.TABLE)
    assert blocks.plan(PROBLEM).forward == blocks.Blocks(4, 256, 256)
    assert len(json.loads(blocks.TABLE.read_text())["entries"]) == 1


def test_graphs_recorded_for_a_chip_get_its_entries(monkeypatch):
    monkeypatch.setattr(lazy_target, "_told", None)
    lazy_target.record_for("TPU", "v6e")
    assert (lazy_target.platform(), lazy_target.chip()) == ("TPU", "v6e")
