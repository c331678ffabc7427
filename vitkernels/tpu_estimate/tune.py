"""Search block sizes of pallas_flash for a TPU by their estimated time, for the table that the kernels read.

The form (single pass over complete rows of scores, or online softmax) is common to both passes; block sizes are chosen
per pass. The search starts from the blocks of the kernels' rule and varies one size at a time. It skips blocks that do
not compile within five minutes, and a form whose starting point is 1.5 times slower than the rule. A pass keeps the
rule's blocks unless others take at least 10 % less time, because smaller differences are not significant
(validate.CAVEAT). A form other than the rule's must reduce the sum of both passes by 10 %.

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
from vitkernels.tpu_estimate.chips import Chip
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import estimate_program

SIGNIFICANT = 0.9  # largest ratio to the rule's estimate that counts as an improvement
_HOPELESS = 1.5  # ratio to the rule's estimate
_TIMEOUT_S = 300  # per compilation
_SIZES = (128, 256, 512, 1024, 1280)  # upper bounds: each stands for the block below it with the least padding
# Scores per block of each form. Larger blocks take the compiler minutes or exceed VMEM.
_MAX_SCORES = {"single_pass": 4 * 2**20, "online_softmax": 2 * 2**20}
_SINGLE_PASS_KEYS = 1280

Estimator = Callable[[str, str, PassBlocks], float]  # (form, pass, blocks) -> ms; may raise UsageError


@dataclass(frozen=True)
class SearchResult:
    """The result of a search; estimated milliseconds by pass."""

    plan: BlockPlan
    ms: dict[str, float]
    rule: BlockPlan
    rule_ms: dict[str, float]
    best: dict[str, tuple[BlockPlan, dict[str, float]]]  # by form, significant or not

    def entry(self, problem: TpuProblem, chip: str) -> dict:
        """Return the entry for the table of block plans."""
        sizes = {name: getattr(problem, name) for name in ("dtype", "heads", "head_dim", "q_tokens", "kv_tokens")}
        blocks = {pass_name: asdict(getattr(self.plan, pass_name)) for pass_name in PASSES}
        times = {"images": problem.batch, "estimate_ms": self.ms, "estimate_ms_by_rule": self.rule_ms}
        return {"chip": chip, **sizes, "form": self.plan.form, **blocks, **times}


def plain_problem(shape_BHND: tuple[int, int, int, int]) -> TpuProblem:
    """Return plain self-attention in bfloat16 at the shape (B, H, N, D)."""
    B, H, N, D = shape_BHND
    return TpuProblem(B, H, D, N, N, D**-0.5, False, "bfloat16", None, None, False)


def search(problem: TpuProblem, estimate: Estimator, report: Callable[[str], None] = print) -> SearchResult:
    """Return the plan with the lowest estimate, or the rule's if none is significantly better.

    `report` receives one line per estimate.
    """
    rule, known = block_plans.rule(problem), {}

    def ms(form: str, pass_name: str, blocks: PassBlocks) -> float:
        key = form, pass_name, blocks
        if key not in known:
            try:
                known[key] = estimate(*key)
                result = f"ESTIMATE {known[key]:.3f} ms"
            except UsageError as error:
                known[key] = float("inf")
                result = str(error).strip().splitlines()[-1][:150]
            report(
                f"{form} {pass_name}, {blocks.heads} heads × {blocks.queries} queries × {blocks.keys} keys: {result}"
            )
        return known[key]

    rule_ms = {pass_name: ms(rule.form, pass_name, getattr(rule, pass_name)) for pass_name in PASSES}
    if float("inf") in rule_ms.values():
        message = f"the rule's own blocks do not compile for {problem}, so there is no baseline"
        raise UsageError(message, code="tpu_estimate.no_baseline")
    best = {}
    for form in _forms(problem):
        start = rule if form == rule.form else _start(problem, form)
        start_ms = sum(ms(form, pass_name, getattr(start, pass_name)) for pass_name in PASSES)
        if start_ms < _HOPELESS * sum(rule_ms.values()) or start_ms == float("inf"):
            blocks = [_descend(problem, form, pass_name, getattr(start, pass_name), ms) for pass_name in PASSES]
            start = BlockPlan(form, *blocks, source="table")  # type: ignore[misc, arg-type]  # one of each pass
        best[form] = start, {pass_name: ms(form, pass_name, getattr(start, pass_name)) for pass_name in PASSES}
    plan, times = _choose(best, rule, rule_ms)
    return SearchResult(plan, times, rule, rule_ms, best)


def _choose(best: dict, rule: BlockPlan, rule_ms: dict[str, float]) -> tuple[BlockPlan, dict[str, float]]:
    """Return the rule's plan, with each significantly better part replaced."""
    totals = {form: sum(times.values()) for form, (_, times) in best.items()}
    form = min(totals, key=lambda form: totals[form])
    if totals[form] <= SIGNIFICANT * min(totals[rule.form], sum(rule_ms.values())):
        return best[form]
    plan, times = best[rule.form]
    better = [name for name in PASSES if times[name] <= SIGNIFICANT * rule_ms[name]]
    plan = replace(rule, **{name: getattr(plan, name) for name in better}, source="table" if better else "rule")
    return plan, rule_ms | {name: times[name] for name in better}


def _forms(problem: TpuProblem) -> list[str]:
    return (
        ["single_pass", "online_softmax"]
        if round_up(problem.kv_tokens, LANES) <= _SINGLE_PASS_KEYS
        else ["online_softmax"]
    )


def _start(problem: TpuProblem, form: str) -> BlockPlan:
    """Return the starting point of a form other than the rule's."""
    rows, keys = (block_plans.even(tokens, 512) for tokens in (problem.q_tokens, problem.kv_tokens))
    blocks = PassBlocks(group_of_heads(problem), rows, keys)
    if form == "single_pass":
        blocks = replace(blocks, queries=min(rows, 256), keys=round_up(problem.kv_tokens, LANES))
    return BlockPlan(form, blocks, blocks)


def _descend(problem: TpuProblem, form: str, pass_name: str, blocks: PassBlocks, ms) -> PassBlocks:
    """Return the best blocks found by varying heads, queries and keys in turn, once."""
    for name in ("heads", "queries", "keys"):
        blocks = min([blocks, *_varied(problem, form, blocks, name)], key=lambda blocks: ms(form, pass_name, blocks))
    return blocks


def _varied(problem: TpuProblem, form: str, blocks: PassBlocks, name: str) -> Iterator[PassBlocks]:
    if name == "heads":
        group = group_of_heads(problem)
        values = [h for h in range(group, problem.heads + 1, group) if problem.heads % h == 0]
    else:
        tokens = problem.q_tokens if name == "queries" else problem.kv_tokens
        values = sorted({block_plans.even(tokens, size) for size in _SIZES})
        if form == "single_pass" and name == "keys":
            values = [blocks.keys]
    for value in values:
        candidate = replace(blocks, **{name: value})
        queries = round_up(problem.q_tokens, LANES) if form == "single_pass" else candidate.queries
        if candidate.heads * queries * candidate.keys <= _MAX_SCORES[form]:
            yield candidate


def libtpu_estimator(problem: TpuProblem, chip: Chip) -> Estimator:
    """Return the estimator that compiles with libtpu, which takes 10 to 60 s of processor time per call."""

    def estimate(form: str, pass_name: str, blocks: PassBlocks) -> float:
        with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
            sizes = problem.batch, problem.heads, problem.q_tokens, problem.head_dim
            arguments = (form, pass_name, asdict(blocks), *sizes)
            dump = compile_in(Path(folder), f"{__name__}:build", *arguments, chip=chip.name, timeout=_TIMEOUT_S)
            program = estimate_program(dump)
        if program.untimed:
            message = f"no readable schedule of {', '.join(program.untimed)}"
            raise UsageError(message, code="tpu_estimate.unreadable_schedule", operations=program.untimed)
        return program.estimate_ms

    return estimate


def build(form: str, pass_name: str, blocks: dict, batch: int, heads: int, tokens: int, head_dim: int):
    """Return one pass with these blocks for `compile_jax`: a JAX function of the packed arrays, and their shapes."""
    problem, pass_blocks = plain_problem((batch, heads, tokens, head_dim)), PassBlocks(**blocks)
    kernels, none = dispatch.FORMS[form], (None, None, None)
    shape = jax.ShapeDtypeStruct
    qkv, out = (shape((batch, tokens, n * problem.width), "bfloat16") for n in (3, 1))
    if pass_name == "forward":
        return (lambda qkv: kernels.forward(problem, pass_blocks, (qkv,), *none)), [qkv], True
    saved = []
    if form == "online_softmax":
        group = pass_blocks.heads
        saved = [out, shape((batch, heads // group, 1, group, tokens), "float32")]

    def backward(qkv, *arrays):
        return kernels.backward(problem, pass_blocks, (qkv,), *arrays, *none, False)[0]

    return backward, [qkv, *saved, out], True
