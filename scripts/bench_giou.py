"""Time generalized IoU of pairs of boxes: plain torch, torch.compile, jitted JAX, Pallas and Triton.

    python scripts/bench_giou.py                              # 1024 images × 256 boxes, float32
    python scripts/bench_giou.py --shapes 1024,256 1024,16384 --dtypes float32 bfloat16
    python scripts/bench_giou.py --no-estimate                # measurements only

Measures on this machine's GPU, or on its CPU; adds an ESTIMATE for TPU v5e of XLA's fusion and of the Pallas kernel
(needs libtpu; about 20 seconds per figure). On a CPU the second command takes ten minutes. --results appends the rows
to a file as JSON lines.
"""

import argparse
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would reserve most of the GPU's memory

import torch  # noqa: E402

from vitkernels.benchmarks import giou  # noqa: E402
from vitkernels.benchmarks.timing import Timing  # noqa: E402
from vitkernels.tpu_estimate import compiler  # noqa: E402

_NOT_TORCH = ("jax.jit", "pallas")  # cannot be captured by torch's CUDA graphs


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=[(1024, 256)], type=_shape, metavar="IMAGES,BOXES")
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    parser.add_argument("--estimate", action=argparse.BooleanOptionalAction, default=not torch.cuda.is_available())
    parser.add_argument("--results", type=Path, metavar="FILE", help="append the rows to this file as JSON lines")
    options = parser.parse_args(arguments)
    if options.estimate and (reason := compiler.unavailable()) is not None:
        parser.error(f"{reason}; --no-estimate skips the estimates")
    for images, boxes in options.shapes:
        for dtype in options.dtypes:
            rows = measured(images, boxes, dtype)
            if options.estimate:
                rows += estimated(images, boxes, dtype)
            if options.results:
                with options.results.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in rows)


def measured(images: int, boxes: int, dtype: str) -> list[dict]:
    """Measure all contenders and print a table; return its rows.

    "per call" is the time of back-to-back calls, including the host; "device" is that of CUDA graph replays.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    preds, targets = giou.random_boxes(images, boxes, device, getattr(torch, dtype))
    print(f"\n{images} × {boxes} boxes, {dtype}, measured on {name}")
    head = ("pass", "contender", "per call ms", *(("device ms", "GB/s", "of a copy") if device == "cuda" else ()))
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    rows = []
    for pass_name, contenders in (("forward", giou.contenders), ("forward+backward", giou.training_contenders)):
        size = giou.min_bytes(images, boxes, preds.element_size(), pass_name)
        copy = _copy_rate(size) if device == "cuda" else None
        for contender, function in contenders(preds, targets).items():
            row = {"images": images, "boxes": boxes, "dtype": dtype, "pass": pass_name, "contender": contender}
            row |= {"how": "measured", "device": name, "per_call_ms": giou.per_call_ms(function)}
            cells = [pass_name, contender, f"{row['per_call_ms']:.4f}"]
            if device == "cuda":
                row["device_ms"] = None if contender in _NOT_TORCH else Timing.on_device(function, 50).median
                rate = size / (row["device_ms"] or row["per_call_ms"]) / 1e6
                row |= {"gb_per_s": rate, "of_copy": rate / copy}
                on_device = "–" if row["device_ms"] is None else f"{row['device_ms']:.4f}"
                cells += [on_device, f"{rate:.0f}", f"{rate / copy:.0%}"]
            rows.append(row)
            print("| " + " | ".join(cells) + " |", flush=True)
    for contender, reason in giou.unavailable(preds).items():
        print(f"not measured: {contender}: {reason}")
    if device == "cuda":
        fits = giou.min_bytes(images, boxes, preds.element_size(), "forward") < 50e6
        where = "fit into the L2 cache, as do those of the copy" if fits else "do not fit into the L2 cache"
        print(f"GB/s counts each box and score once. The tensors of the forward pass {where}.")
    return rows


def _copy_rate(size: int) -> float:
    """Return the GB/s, read plus written, of a copy that moves `size` bytes."""
    source = torch.rand(size // 8, device="cuda")
    target = torch.empty_like(source)
    return size / Timing.on_device(lambda: target.copy_(source), 50).median / 1e6


def estimated(images: int, boxes: int, dtype: str) -> list[dict]:
    """Estimate the contenders for TPU v5e and print a table; return its rows."""
    print(f"\n{images} × {boxes} boxes, {dtype}, ESTIMATE for TPU v5e from libtpu's schedule; no TPU was used")
    print("| pass | contender | ESTIMATE ms |\n|---|---|---|")
    rows = []
    for pass_name in ("forward", "backward"):
        for contender in giou.ESTIMATED:
            ms, untimed = giou.estimate_ms(contender, pass_name, dtype, images, boxes)
            row = {"images": images, "boxes": boxes, "dtype": dtype, "pass": pass_name, "contender": contender}
            rows.append(row | {"how": "ESTIMATE", "device": "TPU v5e", "estimate_ms": ms, "untimed": untimed})
            note = f" (no readable schedule: {', '.join(untimed)})" if untimed else ""
            print(f"| {pass_name} | {contender} | {ms:.4f}{note} |", flush=True)
    return rows


def _shape(text: str) -> tuple[int, int]:
    images, boxes = (int(part) for part in text.split(","))
    return images, boxes


if __name__ == "__main__":
    main()
