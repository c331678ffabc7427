"""The page on paged attention, from results/paged_attention.jsonl."""

from vitkernels.benchmarks.tables import markdown

TITLE = "Paged attention on a GPU"
_INTRODUCTION = (
    "One query token per sequence against a paged key-value cache in bfloat16. Times are medians in ms with the "
    "20th and 80th percentile: of calls on a cold L2 cache, including host time if the host is slower, and of "
    'replays of a CUDA graph. The error is relative to the float64 reference. "× faster" is the speedup over '
    "gathering the pages for SDPA, in graph replays. To measure: `python scripts/bench_paged_attention.py`."
)
_RENAMED = {"heads of their own, ragged": "one key head per query head, ragged"}  # cases of older rows


def page(rows: list[dict]) -> str:
    """Return the page in Markdown."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["date"], tuple(row["case"].values())), []).append(row)
    return markdown.page(TITLE, "paged_attention.jsonl", _INTRODUCTION, map(_section, groups.values()))


def _section(rows: list[dict]) -> tuple[str, str]:
    first, case = rows[0], rows[0]["case"]
    lengths = f"1 to {case['tokens']}" if case["ragged"] else str(case["tokens"])
    bandwidth = f"a copy moves {first['copy_bytes_per_second'] / 1e12:.2f} TB/s"
    text = (
        f"{case['sequences']} sequence{'s' * (case['sequences'] != 1)} of {lengths} tokens, "
        f"{case['query_heads']} query heads, {case['key_heads']} "
        f"key heads, head dim {case['head_dim']}, pages of {case['page_size']}. {first['gpu']}, torch "
        f"{first['torch']}, triton {first['triton']}; {first['date']}; {bandwidth}."
    )
    gathered = next((row["graph_ms"]["median"] for row in rows if row["contender"] == "gather + sdpa"), None)
    cells = []
    for row in rows:
        if "problem" in row:
            cells.append((row["contender"], row["problem"], *[markdown.MISSING] * 3))
            continue
        speedup = markdown.number(gathered and gathered / row["graph_ms"]["median"], 2)
        times = (markdown.spread(row["ms"], 4), markdown.spread(row["graph_ms"], 4))
        cells.append((row["contender"], *times, speedup, f"{row['error']:.1e}"))
    headings = ("contender", "called ms", "graph ms", "× faster", "error")
    return _RENAMED.get(case["what"], case["what"]), f"{text}\n\n{markdown.table(headings, cells)}"
