"""The choice of pallas_flash's form and blocks on a TPU: by rule, or from the table of searched blocks."""

import json
from dataclasses import replace

import pytest
import torch
from expecting import error

pytest.importorskip("jax")

import jax

from vitkernels import attention
from vitkernels.attention.pallas_flash.tpu import block_plans, dispatch
from vitkernels.attention.pallas_flash.tpu.tiles import TpuProblem
from vitkernels.bridge import lazy_target, pallas_op

PROBLEM = TpuProblem(1, 4, 64, 200, 200, 0.125, False, "bfloat16", None, None, False, chip="v5e")
# A form other than the rule's, and different groups of heads in forward and backward.
ENTRY = {
    "chip": "v5e",
    "dtype": "bfloat16",
    "heads": 4,
    "head_dim": 64,
    "q_tokens": 200,
    "kv_tokens": 200,
    "form": "online_softmax",
    "forward": {"heads": 2, "queries": 128, "keys": 256},
    "backward": {"heads": 4, "queries": 256, "keys": 128},
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Return a function that replaces the table with these entries."""

    def write(*entries):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        path.write_text(json.dumps({"entries": entries}))
        monkeypatch.setattr(block_plans, "TABLE", path)

    return write


def test_table__applies_to_its_chip_and_problem_only(table):
    table(ENTRY)
    found = block_plans.plan(PROBLEM)
    assert (found.form, found.forward, found.backward) == (
        "online_softmax",
        block_plans.PassBlocks(2, 128, 256),
        block_plans.PassBlocks(4, 256, 128),
    )
    assert "by table" in str(found)
    others = [{"chip": "v6e"}, {"chip": None}, {"q_tokens": 201}, {"dtype": "float32"}, {"is_causal": True}]
    for other in (*others, {"segments": True}, {"bias": (1, 1, 200, 200)}):
        assert block_plans.plan(replace(PROBLEM, **other)).source == "rule"
    assert block_plans.rule(PROBLEM).form == "single_pass"
    table()
    assert block_plans.plan(PROBLEM) == block_plans.rule(PROBLEM)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_table__changes_the_kernels_but_not_the_result(table, passes):
    torch.manual_seed(0)
    qkv = torch.randn(1, 200, 768).bfloat16()
    static = {"heads": 4, "scale": 0.125, "is_causal": False, "extras": (), "bias_gradient": False, "chip": "v5e"}

    def outputs():  # a new function each time, because JAX caches traces
        shape = jax.ShapeDtypeStruct((1, 200, 768), "bfloat16")
        return jax.eval_shape(lambda qkv: dispatch.attend(qkv, **static), shape)

    table()
    assert outputs().shape == (1, 200, 256)
    table(ENTRY)
    _, log_sum_exps = outputs()
    assert log_sum_exps.shape == (1, 2, 1, 2, 200), "two groups of two heads"
    op = pallas_op(dispatch.attend, vjp=dispatch.attend_vjp, name=f"tabled_{passes}")
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
    ("change", "reason"),
    [
        ({"form": "wide"}, "form is 'single_pass' or 'online_softmax', not 'wide'"),
        ({"forward": {"heads": 3, "queries": 128, "keys": 128}}, "heads, 3, must divide the 4 heads"),
        ({"forward": {"heads": 1, "queries": 128, "keys": 128}}, "fill full tiles of 128 lanes"),
        ({"backward": {"heads": 2, "queries": 100, "keys": 128}}, "queries, 100, must be a multiple of 128"),
        ({"backward": {"heads": 2, "queries": 128, "keys": 0}}, "positive integers"),
        ({"form": "single_pass"}, "all 200 keys at once, not 128"),
        ({"forward": {"heads": 2, "queries": 128}}, "keys"),
    ],
)
def test_table__rejects_a_bad_entry(table, change, reason):
    table(ENTRY | change)
    with error("attention.block_table", path=block_plans.TABLE, entry=ENTRY | change) as caught:
        block_plans.plan(PROBLEM)
    assert reason in caught.value.fields["reason"]


def test_table_error__message(table):
    table(ENTRY | {"form": "wide"})
    with error("attention.block_table") as caught:
        block_plans.plan(PROBLEM)
    assert str(block_plans.TABLE) in str(caught.value) and "--tune" in str(caught.value)


def test_shipped_table__is_valid_and_labeled_as_estimated():
    table = json.loads(block_plans.TABLE.read_text())
    assert "ESTIMATE" in table["label"]
    assert block_plans.plan(replace(PROBLEM, q_tokens=7, kv_tokens=7)).source == "rule"  # reading rejects a bad entry
    for entry in table["entries"]:
        times, by_rule = entry["estimate_ms"], entry["estimate_ms_by_rule"]
        assert sum(times.values()) < sum(by_rule.values())


def test_write__replaces_the_entry_of_the_same_problem(table):
    table(ENTRY)
    block_plans.plan(PROBLEM)
    block_plans.write(ENTRY | {"forward": {"heads": 4, "queries": 256, "keys": 256}}, block_plans.TABLE)
    assert block_plans.plan(PROBLEM).forward == block_plans.PassBlocks(4, 256, 256)
    assert len(json.loads(block_plans.TABLE.read_text())["entries"]) == 1


def test_record_for__sets_platform_and_chip(monkeypatch):
    monkeypatch.setattr(lazy_target, "_override", None)
    lazy_target.record_for("TPU", "v6e")
    assert (lazy_target.platform(), lazy_target.chip()) == ("TPU", "v6e")
