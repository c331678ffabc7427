"""The page on attention on TPUs, from results/tpu_attention.jsonl. All times are estimates."""

from vitkernels.benchmarks.tables import markdown
from vitkernels.tpu_estimate.validate import CAVEAT

TITLE = "Attention on a TPU (estimates)"
_INTRODUCTION = (
    f"{CAVEAT} `pallas_flash` and `xla` map a packed qkv (B, N, 3E) to (B, N, E); `xla_apart` takes q, k and v as"
    " (B, H, N, D), so no layout copies are counted; `jax_flash` and `jax_splash` are JAX's kernels at their best "
    'block sizes. "with projections" adds the qkv and output projections. "time / ours" is the estimate divided by '
    "that of `pallas_flash`. To estimate: `python scripts/tpu_report.py --shapes vit --results FILE`."
)


def page(rows: list[dict]) -> str:
    """Return the page in Markdown; the last one of repeated estimates is shown."""
    latest: dict[tuple, dict[str, dict[str, dict]]] = {}
    for row in rows:
        key = (row["chip"], tuple(row["shape_BHND"]))
        latest.setdefault(key, {}).setdefault(row["pass"], {})[row["contender"]] = row
    sections = [
        (f"TPU {chip}, (B, H, N, D) = ({', '.join(map(str, shape))})", _shape(passes))
        for (chip, shape), passes in sorted(latest.items())
    ]
    return markdown.page(TITLE, "tpu_attention.jsonl", _INTRODUCTION, sections)


def _shape(passes: dict[str, dict[str, dict]]) -> str:
    cells = []
    for which in sorted(passes, key=lambda name: (name == "with projections", name)):
        by_contender = passes[which]
        ours = by_contender.get("pallas_flash", {}).get("estimate_ms")
        for contender, row in sorted(by_contender.items(), key=lambda item: (item[0] != "pallas_flash", item[0])):
            if "error" in row:
                error = row["error"].strip().splitlines()[-1]
                cells.append((which, contender, error, *[markdown.MISSING] * 5))
                continue
            cells.append(
                (
                    which,
                    contender,
                    f"{row['estimate_ms']:.3f}",
                    markdown.number(ours and row["estimate_ms"] / ours, 2),
                    f"{row['estimate_compute_ms']:.3f}",
                    f"{row['estimate_memory_ms']:.3f}",
                    f"{row['estimate_mxu_share']:.0%}",
                    f"{row['hbm_size_bytes'] / 2**20:.0f}",
                )
            )
    headings = ("pass", "contender", "estimate ms", "time / ours", "compute ms", "HBM ms", "MXU", "HBM MiB")
    return markdown.table(headings, cells)
