"""Search pallas_flash's blocks for a TPU by the estimate, with no TPU; what is clearly better goes into its table.

The form (whole rows of scores, or online) is one for both passes, blocks are each pass' own. From the blocks that the
kernels' rule gives, one size at a time is varied while the others stand. Passed over: what does not compile, or not in
five minutes, and a form that begins half as slow again as the rule. A pass keeps the rule's blocks unless others take
10 % less, because smaller differences say nothing (tpu_validation.CAVEAT); another form than the rule's must take 10 %
less in both passes together.

Shape suffixes: B batch, H heads, N tokens, D head dim.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vitkernels.attention.pallas_flash.tpu import block_plans, dispatch
from vitkernels.attention.pallas_flash.tpu.block_plans import PASSES, BlockPlan, PassBlocks
from vitkernels.attention.pallas_flash.tpu.tiles import LANES, TpuProblem, group_of_heads, round_up
from vitkernels.bridge.jax_compat import jax
from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import dump as tpu_dump
from vitkernels.tpu_estimate import program as tpu_program
from vitkernels.tpu_estimate.chips import Chip

CLEARLY = 0.9  # of the rule's estimate, or less
_HOPELESS = 1.5  # times the rule's estimate
_PATIENCE_S = 300  # for one compilation
_SIZES = (128, 256, 512, 1024, 1280)  # at most: what is tried is the block below with the least padding
# Of a short form's straight piece, and of a long form's step: beyond, the compiler takes minutes or runs out of VMEM.
_SCORES = {"single_pass": 4 * 2**20, "online_softmax": 2 * 2**20}
_SHORT_KEYS = 1280

Estimate = Callable[[str, str, PassBlocks], float]  # (form, pass, blocks) -> ms; raises UsageError where it cannot be


@dataclass(frozen=True)
class Found:
    """What a search ended with; milliseconds by pass, estimated."""

    plan: BlockPlan
    ms: dict[str, float]
    rule: BlockPlan
    rule_ms: dict[str, float]
    best: dict[str, tuple[BlockPlan, dict[str, float]]]  # of each form, whether or not it is clearly better

    def entry(self, problem: TpuProblem, chip: str) -> dict:
        """The table's entry."""
        sizes = {name: getattr(problem, name) for name in ("dtype", "heads", "head_dim", "q_tokens", "kv_tokens")}
        blocks = {which: asdict(getattr(self.plan, which)) for which in PASSES}
        times = {"images": problem.batch, "estimate_ms": self.ms, "estimate_ms_by_rule": self.rule_ms}
        return {"chip": chip, **sizes, "form": self.plan.form, **blocks, **times}


def problem(shape_BHND: tuple[int, int, int, int]) -> TpuProblem:
    """Plain self-attention in bfloat16."""
    B, H, N, D = shape_BHND
    return TpuProblem(B, H, D, N, N, D**-0.5, False, "bfloat16", None, None, False)


def search(of: TpuProblem, estimate: Estimate, say: Callable[[str], None] = print) -> Found:
    """The plan with the least estimate, or the rule's where none is clearly better. `say` is told of each estimate."""
    rule, known = block_plans.rule(of), {}

    def ms(form: str, which: str, blocks: PassBlocks) -> float:
        if (form, which, blocks) not in known:
            try:
                known[form, which, blocks] = estimate(form, which, blocks)
                told = f"ESTIMATE {known[form, which, blocks]:.3f} ms"
            except UsageError as error:
                known[form, which, blocks] = float("inf")
                told = str(error).strip().splitlines()[-1][:150]
            say(f"{form} {which}, {blocks.heads} heads × {blocks.queries} queries × {blocks.keys} keys: {told}")
        return known[form, which, blocks]

    rule_ms = {which: ms(rule.form, which, getattr(rule, which)) for which in PASSES}
    if float("inf") in rule_ms.values():
        raise UsageError(f"the rule's own blocks do not compile for {of}: there is nothing to compare with")
    found = {}
    for form in _forms(of):
        start = rule if form == rule.form else _start(of, form)
        began = sum(ms(form, which, getattr(start, which)) for which in PASSES)
        if began < _HOPELESS * sum(rule_ms.values()) or began == float("inf"):
            blocks = [_descend(of, form, which, getattr(start, which), ms) for which in PASSES]
            start = BlockPlan(form, *blocks, source="table")
        found[form] = start, {which: ms(form, which, getattr(start, which)) for which in PASSES}
    plan, times = _chosen(found, rule, rule_ms)
    return Found(plan, times, rule, rule_ms, found)


def _chosen(found: dict, rule: BlockPlan, rule_ms: dict[str, float]) -> tuple[BlockPlan, dict[str, float]]:
    """The rule's plan, but for what is clearly better."""
    totals = {form: sum(times.values()) for form, (_, times) in found.items()}
    form = min(totals, key=lambda form: totals[form])
    if totals[form] <= CLEARLY * min(totals[rule.form], sum(rule_ms.values())):
        return found[form]
    plan, times = found[rule.form]
    better = [which for which in PASSES if times[which] <= CLEARLY * rule_ms[which]]
    plan = replace(rule, **{which: getattr(plan, which) for which in better}, source="table" if better else "rule")
    return plan, rule_ms | {which: times[which] for which in better}


def _forms(of: TpuProblem) -> list[str]:
    return ["single_pass", "online_softmax"] if round_up(of.kv_tokens, LANES) <= _SHORT_KEYS else ["online_softmax"]


def _start(of: TpuProblem, form: str) -> BlockPlan:
    """Where the search of a form begins that is not the rule's."""
    rows, keys = (block_plans.even(tokens, 512) for tokens in (of.q_tokens, of.kv_tokens))
    blocks = PassBlocks(group_of_heads(of), rows, keys)
    if form == "single_pass":
        blocks = replace(blocks, queries=min(rows, 256), keys=round_up(of.kv_tokens, LANES))
    return BlockPlan(form, blocks, blocks)


def _descend(of: TpuProblem, form: str, which: str, blocks: PassBlocks, ms) -> PassBlocks:
    """The best blocks found by varying heads, queries and keys in turn, once."""
    for name in ("heads", "queries", "keys"):
        blocks = min([blocks, *_varied(of, form, blocks, name)], key=lambda blocks: ms(form, which, blocks))
    return blocks


def _varied(of: TpuProblem, form: str, blocks: PassBlocks, name: str) -> Iterator[PassBlocks]:
    if name == "heads":
        group = group_of_heads(of)
        values = [h for h in range(group, of.heads + 1, group) if of.heads % h == 0]
    else:
        tokens = of.q_tokens if name == "queries" else of.kv_tokens
        values = sorted({block_plans.even(tokens, size) for size in _SIZES})
        if form == "single_pass" and name == "keys":
            values = [blocks.keys]
    for value in values:
        candidate = replace(blocks, **{name: value})
        queries = round_up(of.q_tokens, LANES) if form == "single_pass" else candidate.queries
        if candidate.heads * queries * candidate.keys <= _SCORES[form]:
            yield candidate


def libtpu_estimate(of: TpuProblem, chip: Chip) -> Estimate:
    """The estimate from libtpu's schedules, 10 to 60 s of processor time each."""

    def estimate(form: str, which: str, blocks: PassBlocks) -> float:
        with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
            arguments = (form, which, asdict(blocks), of.batch, of.heads, of.q_tokens, of.head_dim)
            dump = tpu_dump.compile_in(
                Path(folder), f"{__name__}:build", *arguments, chip=chip.name, timeout=_PATIENCE_S
            )
            program = tpu_program.estimate(dump)
        if program.untimed:
            raise UsageError(f"the schedule of {', '.join(program.untimed)} could not be read")
        return program.estimate_ms

    return estimate


def build(form: str, which: str, blocks: dict, batch: int, heads: int, tokens: int, head_dim: int):
    """One pass in these blocks as a JAX function of the packed arrays, and their shapes: compile_jax's arguments."""
    of, cut = problem((batch, heads, tokens, head_dim)), PassBlocks(**blocks)
    kernels, none = dispatch.FORMS[form], (None, None, None)
    shape = jax.ShapeDtypeStruct
    qkv, out = (shape((batch, tokens, n * of.width), "bfloat16") for n in (3, 1))
    if which == "forward":
        return (lambda qkv: kernels.forward(of, cut, (qkv,), *none)), [qkv], True
    saved = (
        [out, shape((batch, heads // cut.heads, 1, cut.heads, tokens), "float32")] if form == "online_softmax" else []
    )

    def backward(qkv, *arrays):
        return kernels.backward(of, cut, (qkv,), *arrays, *none, False)[0]

    return backward, [qkv, *saved, out], True
