"""The page on quantized layers and 8-bit training, from results/quant.jsonl."""

from vitkernels.benchmarks.tables import markdown

TITLE = "Quantized linear layers"
_INTRODUCTION = (
    "Forward passes of the four linear layers of a ViT-L block on random bfloat16 tokens, including the rounding of "
    'the tokens: medians in µs, with the speedup over bf16 in brackets. The last row is the sum over the layers. "bf16 '
    'again" shows the noise. Graph replays exclude host time; calls with a cold L2 cache include host time if the host '
    "is slower. To measure: `python scripts/bench_quant.py`."
)


def page(rows: list[dict]) -> str:
    """Return the page in Markdown."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if "linear" in row:
            groups.setdefault((row["date"], row["tokens"], row["how"]), []).append(row)
    sections = []
    for (date, tokens, how), group in groups.items():
        text = f"{group[0]['gpu']}, torch {group[0]['torch']}; {date}.\n\n{_layers(group)}"
        sections.append((f"{tokens} tokens, {how}, {date}", text))
    sections += [("8-bit training", _training([row for row in rows if "step_ms" in row]))]
    sections += [
        ("Product and rounding timed separately", _separate([row for row in rows if "int8_product_us" in row]))
    ]
    return markdown.page(TITLE, "quant.jsonl", _INTRODUCTION, sections)


def _layers(rows: list[dict]) -> str:
    names = list(dict.fromkeys(row["linear"] for row in rows))
    by_size: dict[tuple, dict[str, float]] = {}
    for row in rows:
        by_size.setdefault(tuple(row["in_out"]), {})[row["linear"]] = row["ms"]["median"] * 1e3
    lines = {f"{size[0]}, {size[1]}": times for size, times in by_size.items()}
    lines["sum"] = {name: sum(times[name] for times in by_size.values()) for name in names}
    cells = [
        (label, *(f"{times[name]:.0f} ({times['bf16'] / times[name]:.2f} ×)" for name in names))
        for label, times in lines.items()
    ]
    return markdown.table(("in, out features", *names), cells)


def _training(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        loss = row["mean_loss_against_bf16"]
        times = {"median": row["step_ms"], "p10": row["p10"], "p90": row["p90"]}
        cells.append(
            (
                f"{row['model']}, batch {row['batch_size']}, `attn={row['attn']}`",
                row["quant"],
                str(row["steps"]),
                markdown.percentiles(times),
                f"{row['peak_GiB']:.1f}",
                markdown.MISSING if loss is None else f"{loss:+.4f}",
                row["note"],
            )
        )
    headings = ("model", "quant", "steps", "step ms (p10, p90)", "peak GiB", "mean loss against bf16", "note")
    return markdown.table(headings, cells)


def _separate(rows: list[dict]) -> str:
    cells = [
        (
            f"{row['in_out'][0]}, {row['in_out'][1]}",
            *(f"{row[key]:.0f}" for key in ("bf16_linear_us", "int8_product_us", "quantize_tokens_us")),
            row["note"],
        )
        for row in rows
    ]
    headings = ("in, out features", "bf16 linear µs", "int8 product µs", "rounding of tokens µs", "note")
    return markdown.table(headings, cells)
