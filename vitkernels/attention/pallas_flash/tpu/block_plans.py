"""How pallas_flash cuts a problem on a TPU: whole rows of scores or the online form, and the blocks of each pass.

A rule answers for every problem. Where `scripts/tpu_report.py --tune` found better blocks than the rule's, they are in
pallas_flash_blocks.json beside this file, for one chip and one problem an entry. Nothing in it was measured: its times
are ESTIMATES from libtpu's schedules.
"""

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from vitkernels.attention.pallas_flash.tpu.tiles import LANES, ROWS, VMEM_LIMIT, TpuProblem, group_of_heads, round_up
from vitkernels.errors import UsageError

TABLE = Path(__file__).with_suffix(".json")
PASSES = ("forward", "backward")
# Scores that one straight piece of code may hold: past it the compiler takes minutes.
_UNROLLED = 4 * 2**20
_SCORE_ARRAYS = (
    10  # arrays of one block's scores that the short backward kernel holds at a time (7 to 9 were scheduled)
)
_LONG_SCORES = 2 * 1024 * 512  # of all heads of a step; more outgrows the compiler's patience, fewer its overhead


@dataclass(frozen=True)
class PassBlocks:
    """Of one pass. Short: heads in a straight piece of code, at most so many queries in a block, and every key.
    Long: heads of a grid step, and the query and key rows of a block."""

    heads: int
    queries: int
    keys: int


@dataclass(frozen=True)
class BlockPlan:
    """A problem's form (short: whole rows of scores; long: the online softmax), and the blocks of both passes."""

    form: str
    forward: PassBlocks
    backward: PassBlocks
    source: str = "rule"  # or table

    def __str__(self) -> str:
        passes = [f"{b.heads} heads × {b.queries} queries × {b.keys} keys" for b in (self.forward, self.backward)]
        return f"blocks by {self.source}: {self.form} form, forward {passes[0]}, backward {passes[1]}"


def plan(problem: TpuProblem) -> BlockPlan:
    """The table's plan where it has one for the problem's chip and sizes, the rule's otherwise."""
    return _table(TABLE).get(_key(problem)) or rule(problem)


def rule(problem: TpuProblem) -> BlockPlan:
    """What holds for every problem, on every chip."""
    if not takes_whole_rows(problem):
        blocks = _long(problem)
        return BlockPlan("online_softmax", blocks, blocks)
    group = group_of_heads(problem)
    most = max(_UNROLLED // (_scores_of_group(problem) // group), group)
    heads = max(h for h in range(group, problem.heads + 1, group) if problem.heads % h == 0 and h <= most)
    blocks = PassBlocks(heads, 256, round_up(problem.kv_tokens, LANES))
    return BlockPlan("single_pass", blocks, blocks)


def _scores_of_group(problem: TpuProblem) -> int:
    """Scores in the smallest piece of straight code: a group of heads that fills whole lane tiles.

    Float32 ones count four times: an honest product is as many passes as that and more.
    """
    rows, columns = round_up(problem.q_tokens, LANES), round_up(problem.kv_tokens, LANES)
    return group_of_heads(problem) * rows * columns * (4 if problem.dtype == "float32" else 1)


def takes_whole_rows(problem: TpuProblem) -> bool:
    """Whether the short form is for the problem: its code compiles in seconds and its blocks fit in VMEM."""
    if _scores_of_group(problem) > _UNROLLED:
        return False
    itemsize = 2 if problem.dtype == "bfloat16" else 4
    n, m = round_up(problem.q_tokens, LANES), round_up(problem.kv_tokens, LANES)
    # Backward: q, k, v, do in and dq, dk, dv out, each in two buffers.
    blocks = 2 * itemsize * problem.width * (3 * n + 4 * m)
    for shape, size in ((problem.bias, 4 + 4), (problem.mask, 2)):  # the bias and its gradient
        if shape is not None:
            _, heads, rows, columns = shape
            # A single row or column still fills whole registers.
            blocks += 2 * size * heads * (m if columns > 1 else ROWS) * (n if rows > 1 else LANES)
    return blocks + _SCORE_ARRAYS * 4 * m * min(n, 256) < 0.8 * VMEM_LIMIT


def _long(problem: TpuProblem) -> PassBlocks:
    heads = group_of_heads(problem)
    queries, keys = 1024, 1024
    while heads * queries * keys > _LONG_SCORES and queries * keys > LANES * LANES:
        queries, keys = (queries, keys // 2) if keys > queries else (queries // 2, keys)
    return PassBlocks(heads, even(problem.q_tokens, queries), even(problem.kv_tokens, keys))


def even(tokens: int, largest: int) -> int:
    """Rows of a block, in whole tiles: the fewest padded rows, where each block itself costs about half a tile."""
    sizes = range(LANES, largest + 1, LANES)
    return min(sizes, key=lambda size: -(-tokens // size) * (size + LANES // 2))


# ---------------------------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------------------------

_SIZES = ("heads", "head_dim", "q_tokens", "kv_tokens")


def _key(problem: TpuProblem) -> tuple | None:
    """None for a problem with a bias, a mask, segments or causality: what joins the scores takes VMEM of its own."""
    if problem.may_lose_rows or problem.is_causal:
        return None
    return problem.chip, problem.dtype, *[getattr(problem, name) for name in _SIZES]


@cache
def _table(path: Path) -> dict[tuple, BlockPlan]:
    """The file's entries; raises UsageError with the first that no kernel can run."""
    found = {}
    for entry in json.loads(path.read_text())["entries"]:
        try:
            sizes = [entry[name] for name in _SIZES]
            passes = [PassBlocks(**entry[which]) for which in PASSES]
            chosen = BlockPlan(entry["form"], *passes, source="table")
            reason = refusal(chosen, *sizes)
            key = (entry["chip"], entry["dtype"], *sizes)
        except (KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            raise UsageError(
                f"{path}: {reason}, in the entry {json.dumps(entry)}; mend it, take it out (the kernels' rule then "
                "answers), or write it anew with scripts/tpu_report.py --tune"
            )
        found[key] = chosen
    return found


def refusal(chosen: BlockPlan, heads: int, head_dim: int, q_tokens: int, kv_tokens: int) -> str | None:
    """Why the kernels cannot run in these blocks; None when they can."""
    if chosen.form not in ("single_pass", "online_softmax"):
        return f"form is 'single_pass' or 'online_softmax', not {chosen.form!r}"
    for which in PASSES:
        blocks = getattr(chosen, which)
        if not all(isinstance(n, int) and n > 0 for n in asdict(blocks).values()):
            return f"{which}'s heads, queries and keys are positive integers, not {asdict(blocks)}"
        if heads % blocks.heads or (blocks.heads != heads and blocks.heads * head_dim % LANES):
            return f"{which}'s heads, {blocks.heads}, must divide the {heads} heads and fill whole tiles of 128 lanes"
        if blocks.queries % LANES:
            return f"{which}'s queries, {blocks.queries}, must be a multiple of {LANES}"
        if chosen.form == "single_pass" and blocks.keys < kv_tokens:
            return f"the short form takes all {kv_tokens} keys at once, not {blocks.keys}"
        if blocks.keys % LANES:
            return f"{which}'s keys, {blocks.keys}, must be a multiple of {LANES}"
    return None


def write(entry: dict, path: Path = TABLE) -> None:
    """Put the entry into the table, in place of the one for the same chip and problem."""
    _replace(entry, [entry], path)


def remove(entry: dict, path: Path = TABLE) -> None:
    """Take the entry for this one's chip and problem out of the table: the rule answers again."""
    _replace(entry, [], path)


def _replace(old: dict, new: list[dict], path: Path) -> None:
    table = json.loads(path.read_text()) if path.exists() else {"entries": []}
    identity = ("chip", "dtype", *_SIZES)
    kept = [entry for entry in table["entries"] if any(entry[name] != old[name] for name in identity)]
    path.write_text(json.dumps(table | {"entries": [*kept, *new]}, indent=1) + "\n")
    _table.cache_clear()
    _table(path)
