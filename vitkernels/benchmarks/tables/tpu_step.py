"""The page on training steps on TPUs, from results/tpu_step.jsonl. All times are estimates."""

from vitkernels.benchmarks.tables import markdown
from vitkernels.tpu_estimate.validate import CAVEAT

TITLE = "Training step on a TPU (estimates)"
_INTRODUCTION = (
    f"{CAVEAT} Steps with AdamW in bf16 on one chip; `quant=int8` computes the products of the blocks in int8. MFU is "
    "relative to the bf16 peak. To estimate: `vitkernels tpu-estimate step SETTINGS --json FILE`. [The notebook]"
    "(../notebook/tpu_step.md) describes the kernels."
)
_PARTS = ("Pallas kernels", "matrix products", "LayerNorm", "elementwise, sums", "copies", "optimizer")


def page(rows: list[dict]) -> str:
    """Return the page in Markdown: a section per model, rows in the order of the file."""
    sections: dict[tuple, list[dict]] = {}
    for row in rows:
        sections.setdefault((row["chip"], row["model"], row["batch"], row["layers"]), []).append(row)
    return markdown.page(
        TITLE,
        "tpu_step.jsonl",
        _INTRODUCTION,
        [
            (f"TPU {chip}, {model}, batch {batch}, {layers} layers", _table(found))
            for (chip, model, batch, layers), found in sections.items()
        ],
    )


def _table(rows: list[dict]) -> str:
    first = rows[0]["estimate_ms"]
    cells = [
        (
            f"`{row['settings']}`",
            f"{row['estimate_ms']:.1f}",
            f"{first / row['estimate_ms']:.2f}",
            f"{row['batch'] / row['estimate_ms'] * 1e3:.0f}",
            f"{row['estimate_mfu']:.0%}",
            f"{row['hbm_size_bytes'] / 2**30:.2f}",
            *[_part(row["parts"].get(f"{part}_ms", 0.0)) for part in _PARTS],
            row["note"],
        )
        for row in rows
    ]
    headings = (
        "settings",
        "estimate ms",
        "speedup",
        "images/s",
        "MFU",
        "HBM GiB",
        *[f"{p}, ms" for p in _PARTS],
        "note",
    )
    return markdown.table(headings, cells)


def _part(ms: float) -> str:
    return f"{ms:.2f}" if ms >= 0.01 else markdown.MISSING
