"""Estimate the collectives of a training step on a slice of TPUs, and how the step scales to 4, 8 and 16 chips.

Chips exchange data over links to their neighbors in a grid. Slices this small have no wraparound links, so a chip in
a corner has one link per axis, and everything that it must receive comes through these: an all-gather or
reduce-scatter of V bytes over n chips takes (n-1)/n · V / (links · bandwidth) plus a latency per hop of the longest
path, an all-reduce twice that. A ring through all chips of a grid reaches this bound. Source of the method, of the
bandwidths per link and of the latency: "How to Scale Your Model", jax-ml.github.io/scaling-book, parts 2 and 3.

Gradients are reduced, and fsdp's weights gathered, in bfloat16, as libtpu compiles the step; fsdp gathers each weight
for the forward and again for the backward pass. Nothing here was measured.
"""

from dataclasses import dataclass

from vitkernels.errors import UsageError
from vitkernels.tpu_estimate.chips import CHIPS, Chip

LINK_BANDWIDTH = {"v5e": 4.5e10, "v5p": 9e10, "v6e": 9e10}  # bytes per second of one link, in one direction
HOP_SECONDS = 1e-6
GRIDS: dict[str, dict[int, tuple[int, ...]]] = {
    "v5e": {4: (2, 2), 8: (2, 4), 16: (4, 4)},
    "v6e": {4: (2, 2), 8: (2, 4), 16: (4, 4)},
    "v5p": {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4)},
}
STRATEGIES = ("ddp", "fsdp")
_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
_PERMUTE = "collective-permute"  # every chip sends all of its array to a neighbour
_BYTES = 2  # per gradient or gathered weight


def collective_ms(kind: str, size: float, grid: tuple[int, ...], chip: Chip = CHIPS["v5e"]) -> float:
    """Return the milliseconds of a collective over a grid of chips.

    Args:
        kind: all-gather, reduce-scatter, all-reduce, or collective-permute to a neighbour.
        size: bytes of the complete array; of a collective-permute, those that each chip sends.
    """
    if kind == _PERMUTE:
        return (size / LINK_BANDWIDTH[chip.name] + HOP_SECONDS) * 1e3
    axes = [length for length in grid if length > 1]
    chips, passes = 1, _PASSES[kind]
    for length in axes:
        chips *= length
    if chips == 1:
        return 0.0
    seconds = (chips - 1) / chips * size / (len(axes) * LINK_BANDWIDTH[chip.name])
    return passes * (seconds + sum(length - 1 for length in axes) * HOP_SECONDS) * 1e3


@dataclass(frozen=True)
class PublishedCollective:
    """A published timing of a collective: bytes of the complete array over a grid of chips."""

    what: str
    kind: str
    size: int
    grid: tuple[int, ...]
    published_ms: float
    source: str
    chip: str = "v5e"

    @property
    def estimate_ms(self) -> float:
        return collective_ms(self.kind, self.size, self.grid, CHIPS[self.chip])

    @property
    def ratio(self) -> float:
        return self.estimate_ms / self.published_ms


_BOOK = "https://jax-ml.github.io/scaling-book/sharding"
_MARIN = "https://github.com/marin-community/marin/issues/6736"
PUBLISHED = (
    PublishedCollective("all-gather of bf16[2048,8192], 4 chips in a row", "all-gather", 2**25, (4,), 0.680, _BOOK),
    PublishedCollective("all-gather of bf16[256,256], 4 chips in a row", "all-gather", 2**17, (4,), 0.008, _BOOK),
    PublishedCollective("permute of 64 MiB per chip, 4 chips", _PERMUTE, 2**26, (2, 2), 0.78198, _MARIN, "v5p"),
    PublishedCollective("permute of 1 MiB per chip, 4 chips", _PERMUTE, 2**20, (2, 2), 0.01694, _MARIN, "v5p"),
    PublishedCollective("permute of 64 MiB per chip, 8 chips", _PERMUTE, 2**26, (2, 4), 0.77634, _MARIN, "v6e"),
    PublishedCollective("permute of 1 MiB per chip, 8 chips", _PERMUTE, 2**20, (2, 4), 0.01745, _MARIN, "v6e"),
)


def traffic(strategy: str, parameters: int) -> list[tuple[str, float]]:
    """Return the collectives of a step as (kind, bytes), of a model with this many parameters."""
    size = parameters * _BYTES
    if strategy == "ddp":
        return [("all-reduce", size)]
    return [("all-gather", size), ("all-gather", size), ("reduce-scatter", size)]


def scaling(found: dict, chips: list[int], strategies: list[str]) -> list[dict]:
    """Return a row per strategy and number of chips, from a step's document for one chip (step_report.document).

    Each chip computes the same batch as the single one; with fsdp it updates its share of the parameters only. Two
    times bound the step: with no collective overlapped, and with all of them behind the computation, as far as it
    lasts.

    Raises UsageError (tpu_estimate.chips, tpu_estimate.strategy) for slices and strategies that are not known.
    """
    chip, step = CHIPS[found["chip"]], found["step"]
    rows = []
    for strategy in strategies:
        if strategy not in STRATEGIES:
            message = f"strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}"
            raise UsageError(message, code="tpu_estimate.strategy", strategy=strategy)
        for count in chips:
            if count not in GRIDS[chip.name]:
                known = ", ".join(map(str, GRIDS[chip.name]))
                message = f"number of {chip.name} chips must be one of {known}; got {count}"
                raise UsageError(message, code="tpu_estimate.chips", chips=count)
            grid = GRIDS[chip.name][count]
            sent = traffic(strategy, found["parameters"])
            communication = sum(collective_ms(kind, size, grid, chip) for kind, size in sent)
            compute = step["estimate_ms"]
            if strategy == "fsdp":
                compute -= step["estimate_ms_of_parts"].get("optimizer", 0.0) * (count - 1) / count
            slow, fast = compute + communication, max(compute, communication)
            rows.append(
                {
                    "strategy": strategy,
                    "chips": count,
                    "estimate_compute_ms": compute,
                    "estimate_communication_ms": communication,
                    "estimate_ms": slow,
                    "estimate_ms_overlapped": fast,
                    "estimate_images_per_s": found["batch"] * count / slow * 1e3,
                    "efficiency": step["estimate_ms"] / slow,
                    "efficiency_overlapped": step["estimate_ms"] / fast,
                }
            )
    return rows


def scaling_table(rows: list[dict], chip: Chip) -> str:
    """Return the rows as Markdown, followed by the published timings of collectives."""
    head = (
        "| chips | parallel | compute ms | collectives ms | ESTIMATE ms, none overlapped | all overlapped | images/s "
    )
    head += "| efficiency |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for row in rows:
        cells = [f"{chip.name} × {row['chips']}", row["strategy"], f"{row['estimate_compute_ms']:.1f}"]
        cells += [f"{row['estimate_communication_ms']:.2f}", f"{row['estimate_ms']:.1f}"]
        cells += [f"{row['estimate_ms_overlapped']:.1f}", f"{row['estimate_images_per_s']:.0f}"]
        cells.append(f"{row['efficiency']:.1%} to {row['efficiency_overlapped']:.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", published_table()])


def published_table() -> str:
    """Return the published timings of collectives as Markdown, each with its estimate."""
    lines = ["| collective | chip | ESTIMATE ms | published ms | ratio | source |", "|---" * 6 + "|"]
    for case in PUBLISHED:
        cells = [case.what, case.chip, f"{case.estimate_ms:.4f}", f"{case.published_ms:g}", f"{case.ratio:.2f}"]
        lines.append("| " + " | ".join([*cells, case.source]) + " |")
    return "\n".join(lines)
