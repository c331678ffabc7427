"""The page on attention, from results/attention.jsonl, and the table that scripts/bench_attention.py prints."""

from vitkernels.benchmarks.tables import markdown

TITLE = "Attention on a GPU"
_OURS = ("triton_flash", "pallas_flash")
_KEYS = ("forward_ms", "both_ms", "device_forward_ms", "device_both_ms", "kernel_forward_ms", "kernel_backward_ms")
_HEADINGS = (
    "forward, called", "forward + backward, called", "forward, device", "forward + backward, device",
    "backward, device", "forward kernel", "backward kernel",
)  # fmt: skip
_FA4 = "flash-attention-4"
_SUMMARY = (47, 48, 49, 50, 51, 52, 53, 54, 57, 59, 60, 56, 58, 55)  # numbers of measurements, in order
_INTRODUCTION = (
    "Each measurement compares backends at one shape (B, H, N, D) in bfloat16, from packed qkv to (B, N, H · D), so"
    " a peer's time includes the layout copies that a module needs around it. Times are medians in ms with the 20th"
    ' and 80th percentile. "device" is the time on the GPU, from replays of a CUDA graph, '
    "for the backward pass the difference of both passes and forward. "
    '"called" is a call from '
    "Python on a cold L2 cache, including host time if the host is slower; the last two columns time the kernels "
    "alone, on contiguous tensors. Here `pallas_flash` runs its Mosaic-GPU kernels (Hopper). To measure: `python "
    "scripts/bench_attention.py --backends pallas_flash triton_flash`. FlashAttention-4 is flash-attn-4 4.0.0b36."
)


def split_measurements(rows: list[dict]) -> list[list[dict]]:
    """Return consecutive rows of one shape; a repeated contender starts a new measurement."""
    found: list[list[dict]] = []
    for row in rows:
        same = found and all(row.get(key) == found[-1][0].get(key) for key in ("shape_BHND", "date", "commit"))
        if not same or any(row["contender"] == other["contender"] for other in found[-1]):
            found.append([])
        found[-1].append(row)
    return found


def page(rows: list[dict]) -> str:
    """Return the page in Markdown."""
    measurements = split_measurements(rows)
    beside = [x for x in measurements if any(r["contender"] == _FA4 and "device_both_ms" in r for r in x)]
    sections = [
        ("Forward + backward on the device, with FlashAttention-4", _summary(beside)),
        ("Forward + backward on the device, without it", _summary([measurements[n - 1] for n in _SUMMARY])),
    ]
    for n, measurement in enumerate(measurements, start=1):
        first = measurement[0]
        shape = ", ".join(map(str, first["shape_BHND"]))
        versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "triton", "jax") if first.get(name))
        text = f"{first['gpu']}, {versions}; {markdown.code(first)}.\n\n{measurement_table(measurement)}"
        sections.append((f"Measurement {n}: ({shape})", text))
    return markdown.page(TITLE, "attention.jsonl", _INTRODUCTION, sections)


def _is_ours(contender: str, ours: tuple[str, ...]) -> bool:
    return contender.removesuffix(" again") in ours


def _best_peer(measurement: list[dict], key: str, ours: tuple[str, ...] = _OURS) -> float | None:
    peers = [row[key]["median"] for row in measurement if key in row and not _is_ours(row["contender"], ours)]
    return min(peers, default=None)


def _summary(measurements: list[list[dict]]) -> str:
    cells = []
    for measurement in measurements:
        best = _best_peer(measurement, "device_both_ms")
        times = {row["contender"]: row["device_both_ms"]["median"] for row in measurement if "device_both_ms" in row}
        row = [", ".join(map(str, measurement[0]["shape_BHND"])), measurement[0]["gpu"], f"{best:.3f}"]
        for name in _OURS:
            row += [f"{times[name]:.3f}", f"{best / times[name]:.2f}"]
        again = times.get("pallas_flash again")
        cells.append([*row, markdown.number(again, 3)])
    headings = (
        "B, H, N, D",
        "GPU",
        "best peer",
        "triton_flash",
        "× faster",
        "pallas_flash",
        "× faster",
        "pallas_flash again",
    )
    return markdown.table(headings, cells)


def measurement_table(measurement: list[dict], ours: tuple[str, ...] = _OURS) -> str:
    """Return the table of one shape, with the speedups of `ours` over the best peer."""
    best = {key: _best_peer(measurement, key, ours) for key in _KEYS[:4]}
    cells = []
    for row in measurement:
        speedups = best if _is_ours(row["contender"], ours) else {}
        times = [_cell(row.get(key), speedups.get(key)) for key in _KEYS]
        times.insert(4, _backward(row))
        error = " ".join(row.get("error", "").split()).replace("|", "/")
        cells.append((row["contender"], *times, error))
    failed = any(row.get("error") for row in measurement)
    if not failed:
        cells = [row[:-1] for row in cells]
    return markdown.table(("contender", *_HEADINGS, *(["error"] if failed else [])), cells)


def _backward(row: dict) -> str:
    """Return the device time of the backward pass: of both passes, less that of the forward pass."""
    times = [row[key]["median"] for key in ("device_both_ms", "device_forward_ms") if key in row]
    return f"{times[0] - times[1]:.3f}" if len(times) == 2 else markdown.spread(None)


def _cell(timing: dict | None, best: float | None) -> str:
    text = markdown.spread(timing)
    return f"{text} ({best / timing['median']:.2f} ×)" if timing and best else text
