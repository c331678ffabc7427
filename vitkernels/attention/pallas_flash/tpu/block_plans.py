"""Choose pallas_flash's form on a TPU, single pass or online softmax, and the block sizes of each pass.

A rule covers every problem. Blocks that `scripts/tpu_report.py --tune` found to be better than the rule's are in
block_plans.json, one entry per chip and problem. Nothing in that table was measured: its times are ESTIMATES from
libtpu's schedules.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from vitkernels.attention.pallas_flash.tpu.tiles import LANES, ROWS, VMEM_LIMIT, TpuProblem, group_of_heads, round_up
from vitkernels.errors import UsageError

TABLE = Path(__file__).with_suffix(".json")
PASSES = ("forward", "backward")
# Limit of scores in straight-line code; beyond it the compiler takes minutes.
_UNROLLED_SCORES = 4 * 2**20
# Score arrays of a block that are live at a time in the single-pass backward kernel (7 to 9 were scheduled).
_SCORE_ARRAYS = 10
# Scores of all heads of a grid step: more take too long to compile, fewer are dominated by the step's overhead.
_ONLINE_SCORES = 2 * 1024 * 512


@dataclass(frozen=True)
class PassBlocks:
    """Block sizes of one pass.

    Single pass: heads per piece of straight-line code, maximum queries per block, and all keys, padded.
    Online softmax: heads per grid step, and query and key rows per block.
    """

    heads: int
    queries: int
    keys: int


@dataclass(frozen=True)
class BlockPlan:
    """A problem's form and the block sizes of both passes."""

    form: str  # single_pass (full rows of scores) or online_softmax
    forward: PassBlocks
    backward: PassBlocks
    source: str = "rule"  # or table

    def __str__(self) -> str:
        passes = [f"{b.heads} heads × {b.queries} queries × {b.keys} keys" for b in (self.forward, self.backward)]
        return f"blocks by {self.source}: {self.form}, forward {passes[0]}, backward {passes[1]}"


def plan(problem: TpuProblem) -> BlockPlan:
    """Return the table's plan for the problem's chip and sizes if it has one, else the rule's."""
    return _table(TABLE).get(_key(problem)) or rule(problem)  # type: ignore[arg-type]  # None is not a key


def rule(problem: TpuProblem) -> BlockPlan:
    """Return the rule's plan, which is valid for every problem on every chip."""
    if not fits_single_pass(problem):
        blocks = _online_blocks(problem)
        return BlockPlan("online_softmax", blocks, blocks)
    group = group_of_heads(problem)
    most = max(_UNROLLED_SCORES // (_scores_of_group(problem) // group), group)
    heads = max(h for h in range(group, problem.heads + 1, group) if problem.heads % h == 0 and h <= most)
    blocks = PassBlocks(heads, 256, round_up(problem.kv_tokens, LANES))
    return BlockPlan("single_pass", blocks, blocks)


def _scores_of_group(problem: TpuProblem) -> int:
    """Return the scores in the smallest piece of straight-line code: a group of heads that fills full lane tiles.

    Float32 scores count four times, because a full-precision product takes at least four MXU passes.
    """
    rows, columns = round_up(problem.q_tokens, LANES), round_up(problem.kv_tokens, LANES)
    return group_of_heads(problem) * rows * columns * (4 if problem.dtype == "float32" else 1)


def fits_single_pass(problem: TpuProblem) -> bool:
    """Return whether the single-pass form suits the problem: it compiles in seconds and its blocks fit in VMEM."""
    if _scores_of_group(problem) > _UNROLLED_SCORES:
        return False
    itemsize = 2 if problem.dtype == "bfloat16" else 4
    n, m = round_up(problem.q_tokens, LANES), round_up(problem.kv_tokens, LANES)
    # Backward: inputs q, k, v, do and outputs dq, dk, dv, double-buffered.
    blocks = 2 * itemsize * problem.width * (3 * n + 4 * m)
    for shape, size in ((problem.bias, 4 + 4), (problem.mask, 2)):  # the bias and its gradient
        if shape is not None:
            _, heads, rows, columns = shape
            # A single row or column still occupies full registers.
            blocks += 2 * size * heads * (m if columns > 1 else ROWS) * (n if rows > 1 else LANES)
    return blocks + _SCORE_ARRAYS * 4 * m * min(n, 256) < 0.8 * VMEM_LIMIT


def _online_blocks(problem: TpuProblem) -> PassBlocks:
    heads = group_of_heads(problem)
    queries, keys = 1024, 1024
    while heads * queries * keys > _ONLINE_SCORES and queries * keys > LANES * LANES:
        queries, keys = (queries, keys // 2) if keys > queries else (queries // 2, keys)
    return PassBlocks(heads, even(problem.q_tokens, queries), even(problem.kv_tokens, keys))


def even(tokens: int, largest: int) -> int:
    """Return the rows per block, in full tiles, that minimize padding; each block costs about half a tile extra."""
    sizes = range(LANES, largest + 1, LANES)
    return min(sizes, key=lambda size: -(-tokens // size) * (size + LANES // 2))


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

_SIZES = ("heads", "head_dim", "q_tokens", "kv_tokens")


def _key(problem: TpuProblem) -> tuple | None:
    """Return the table's key; None for a bias, mask, segments or causality, which need additional VMEM."""
    if problem.may_lose_rows or problem.is_causal:
        return None
    return problem.chip, problem.dtype, *[getattr(problem, name) for name in _SIZES]


@cache
def _table(path: Path) -> dict[tuple, BlockPlan]:
    """Return the file's entries; raise UsageError for the first entry that no kernel can run."""
    found = {}
    for entry in json.loads(path.read_text())["entries"]:
        try:
            sizes = [entry[name] for name in _SIZES]
            passes = [PassBlocks(**entry[which]) for which in PASSES]
            chosen = BlockPlan(entry["form"], *passes, source="table")  # type: ignore[misc, arg-type]  # one of each
            reason = invalid(chosen, *sizes)
            key = (entry["chip"], entry["dtype"], *sizes)
        except (KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            raise UsageError(
                f"{path}: {reason}, in the entry {json.dumps(entry)}; fix it, remove it (the rule then applies), or "
                "search again with scripts/tpu_report.py --tune",
                code="attention.block_table",
                path=path,
                entry=entry,
                reason=reason,
            )
        found[key] = chosen
    return found


def invalid(chosen: BlockPlan, heads: int, head_dim: int, q_tokens: int, kv_tokens: int) -> str | None:
    """Return why the kernels cannot run with this plan; None if they can."""
    if chosen.form not in ("single_pass", "online_softmax"):
        return f"form is 'single_pass' or 'online_softmax', not {chosen.form!r}"
    for which in PASSES:
        blocks = getattr(chosen, which)
        if not all(isinstance(n, int) and n > 0 for n in asdict(blocks).values()):
            return f"{which}'s heads, queries and keys must be positive integers, got {asdict(blocks)}"
        if heads % blocks.heads or (blocks.heads != heads and blocks.heads * head_dim % LANES):
            return f"{which}'s heads, {blocks.heads}, must divide the {heads} heads and fill full tiles of 128 lanes"
        if blocks.queries % LANES:
            return f"{which}'s queries, {blocks.queries}, must be a multiple of {LANES}"
        if chosen.form == "single_pass" and blocks.keys < kv_tokens:
            return f"the single_pass form takes all {kv_tokens} keys at once, not {blocks.keys}"
        if blocks.keys % LANES:
            return f"{which}'s keys, {blocks.keys}, must be a multiple of {LANES}"
    return None


def write(entry: dict, path: Path = TABLE) -> None:
    """Add the entry to the table, replacing the one for the same chip and problem."""
    _replace(entry, [entry], path)


def remove(entry: dict, path: Path = TABLE) -> None:
    """Remove the entry for this entry's chip and problem from the table; the rule then applies."""
    _replace(entry, [], path)


def _replace(old: dict, new: list[dict], path: Path) -> None:
    table = json.loads(path.read_text()) if path.exists() else {"entries": []}
    identity = ("chip", "dtype", *_SIZES)
    kept = [entry for entry in table["entries"] if any(entry[name] != old[name] for name in identity)]
    path.write_text(json.dumps(table | {"entries": [*kept, *new]}, indent=1) + "\n")
    _table.cache_clear()
    _table(path)
