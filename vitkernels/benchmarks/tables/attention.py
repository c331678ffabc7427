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
_INTRODUCTION = (
    "Each measurement compares backends at one shape (B, H, N, D) in bfloat16, from packed qkv to (B, N, H · D), so"
    " a peer's time includes the layout copies that a module needs around it. Times are medians in ms with the 20th"
    ' and 80th percentile. "device" is the time on the GPU, from replays of a CUDA graph; for the backward pass, it is '
    'the difference between forward + backward and forward alone. "called" is the time of a call from '
    "Python on a cold L2 cache, including host time if the host is slower. The last two columns time the kernels "
    "alone, on contiguous tensors. Here `pallas_flash` runs its Mosaic-GPU kernels (Hopper). To measure: `python "
    "scripts/bench_attention.py --backends pallas_flash triton_flash`. FlashAttention-4 is flash-attn-4 4.0.0b36."
    " Since 2026-11-28, the contenders take turns in replaying their graphs: on that day in the order of the tables,"
    " which could favor a kernel that followed one of low power; since then in a random order. In earlier measurements,"
    " a contender that was timed after others may have run at a lower clock. The page shows the latest measurement of"
    " each shape; results/attention.jsonl keeps the earlier ones."
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
    latest = _latest(split_measurements(rows))
    with_fa4 = [x for x in latest if any(row["contender"] == _FA4 and "device_both_ms" in row for row in x)]
    sections = [
        ("Forward + backward against FlashAttention-4 and SDPA", _summary(with_fa4)),
        ("Forward + backward against SDPA alone", _summary([x for x in latest if x not in with_fa4])),
    ]
    for measurement in latest:
        first = measurement[0]
        versions = ", ".join(f"{name} {first[name]}" for name in ("torch", "triton", "jax") if first.get(name))
        text = f"{first['gpu']}, {versions}; {markdown.code(first)}.\n\n{measurement_table(measurement)}"
        sections.append((f"({_shape(measurement)}) on an {_gpu(measurement)}", text))
    return markdown.page(TITLE, "attention.jsonl", _INTRODUCTION, sections)


def _latest(measurements: list[list[dict]]) -> list[list[dict]]:
    """Return the last measurement of each GPU and shape, of the fewest tokens first."""
    found = {(m[0]["gpu"], *m[0]["shape_BHND"]): m for m in measurements}
    return sorted(found.values(), key=lambda m: (m[0]["shape_BHND"][2], m[0]["shape_BHND"], m[0]["gpu"]))


def _shape(measurement: list[dict]) -> str:
    return ", ".join(map(str, measurement[0]["shape_BHND"]))


def _gpu(measurement: list[dict]) -> str:
    """Return "H100" of "NVIDIA H100 80GB HBM3"."""
    return measurement[0]["gpu"].split()[1]


def _is_ours(contender: str, ours: tuple[str, ...]) -> bool:
    return contender.removesuffix(" again") in ours


def _best_peer(measurement: list[dict], key: str, ours: tuple[str, ...] = _OURS) -> float | None:
    peers = [row[key]["median"] for row in measurement if key in row and not _is_ours(row["contender"], ours)]
    return min(peers, default=None)


def _summary(measurements: list[list[dict]]) -> str:
    """Return device times of forward + backward, one row per measurement, and the ratio of the best peer's to ours."""
    cells = []
    for measurement in measurements:
        times = {row["contender"]: row["device_both_ms"]["median"] for row in measurement if "device_both_ms" in row}
        peers = [(ms, name) for name, ms in times.items() if not _is_ours(name, _OURS)]
        best, peer = min(peers, default=(None, markdown.MISSING))
        row = [_shape(measurement), _gpu(measurement), peer, markdown.number(best, 3)]
        for name in _OURS:
            row += [markdown.number(times.get(name), 3), markdown.number(_ratio(best, times.get(name)), 2)]
        cells.append(row)
    headings = ("B, H, N, D", "GPU", "best peer", "ms", "triton_flash ms", "ratio", "pallas_flash ms", "ratio")
    return f"A ratio above 1 means that the kernel is faster than the best peer.\n\n{markdown.table(headings, cells)}"


def _ratio(peer: float | None, ours: float | None) -> float | None:
    return None if peer is None or ours is None else peer / ours


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
