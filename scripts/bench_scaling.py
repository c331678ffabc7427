"""How training scales over the GPUs of one host: `train.py` under torchrun, with DDP and FSDP, on fake data.

    python scripts/bench_scaling.py                                  ViT-B/16 at 256 px, batch 128 per GPU, 1, 2, 4 GPUs
    python scripts/bench_scaling.py --model vit_digits --classes 10 --batch 8 --steps 8 --warmup 2 --processes 1 2 \\
        --set runtime=cpu --attn sdpa                                anywhere, to try it out

Weak scaling: each GPU keeps its batch. Efficiency is the median step of one GPU without any engine over that of N GPUs.
Rows are appended to results/scaling.jsonl.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vitkernels.environment import git_commit, versions

ROOT = Path(__file__).resolve().parents[1]


def measure(engine: str, processes: int, args) -> dict:
    """The summary of one run of train.py, in torchrun's processes."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"parallel={engine}", f"model.name={args.model}", f"data.batch_size={args.batch}", f"attn={args.attn}",
            f"data.num_classes={args.classes}", "data=fake", "data.pool_batches=2", "schedule=constant",
            f"trainer.max_steps={args.warmup + args.steps}", f"trainer.warmup_steps={args.warmup}",
            "trainer.eval_every=null", "checkpoints.every_epochs=null", f"hydra.run.dir={folder}", *args.set,
        ]  # fmt: skip
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        subprocess.run([sys.executable, *torchrun, str(ROOT / "train.py"), *overrides], check=True, cwd=ROOT)
        return json.loads((Path(folder) / "summary.json").read_text())


def row(summary: dict, args) -> dict:
    return {
        "model": args.model, "attn": args.attn, "parallel": summary["parallel"], "devices": summary["devices"],
        "batch_size_per_device": args.batch, "device": summary["device"], "precision": summary["precision"],
        "compile": summary["compile"], "ops": summary["ops"], "step_time_ms": summary["step_time_ms"],
        "peak_memory_bytes": summary["peak_memory_bytes"], "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit(), "versions": versions(),
    }  # fmt: skip


def table(rows: list[dict], batch: int) -> str:
    """Markdown; the first row is one device without any engine."""
    base = rows[0]["step_time_ms"]["median"]
    heading = ("parallel", "GPUs", "step ms (p10, p90)", "images/s", "peak GiB per GPU", "efficiency")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for one in rows:
        times, count = one["step_time_ms"], one["devices"]
        lines.append(
            f"| {one['parallel']} | {count} | {times['median']:.2f} ({times['p10']:.2f}, {times['p90']:.2f}) "
            f"| {count * batch / times['median'] * 1e3:.0f} | {one['peak_memory_bytes'] / 2**30:.1f} "
            f"| {100 * base / times['median']:.1f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_b16_256")
    parser.add_argument("--batch", type=int, default=128, help="images per GPU")
    parser.add_argument("--classes", type=int, default=1024)
    parser.add_argument("--attn", default="triton_flash")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--engines", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--set", nargs="*", default=[], help="more settings of train.py")
    parser.add_argument("--results", type=Path, default=ROOT / "results/scaling.jsonl")
    args = parser.parse_args()

    jobs = [("none", 1), *((engine, count) for engine in args.engines for count in args.processes if count > 1)]
    rows = []
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for engine, count in jobs:
        rows.append(row(measure(engine, count, args), args))
        with open(args.results, "a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
    print(f"\n{args.model}, batch {args.batch} per device, {rows[0]['device']}, {rows[0]['precision']}\n")
    print(table(rows, args.batch))


if __name__ == "__main__":
    main()
