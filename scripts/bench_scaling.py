"""How training scales over the GPUs of one host: train.py with DDP and FSDP on fake data, the input never limits.

    python scripts/bench_scaling.py                                  ViT-B/16 at 256 px, batch 128 per GPU, 1 to 8 GPUs
    python scripts/bench_scaling.py --model vit_digits --classes 10 --batch 8 --steps 8 --warmup 6 --processes 1 2 \\
        --set runtime=cpu --attn sdpa --results /tmp/scaling.jsonl   anywhere, to try it out
    python scripts/bench_scaling.py --engines ddp fsdp,gather=bf16   with settings of conf/parallel; by default on GPUs
                                                                     both ways of ddp's gradients, and fsdp

Weak scaling: each GPU keeps its batch. Efficiency is the median step of one GPU alone, without any engine, over that of
N GPUs. All GPUs are also measured at the same time, each by itself: what they leave each other of power and of the
host, and which of them is the slowest, for which the others will wait.
torchrun starts processes once, and those that a run does not need wait. Rows are appended to results/scaling.jsonl.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LONGEST_RUN = timedelta(minutes=20)


def measure(job: int, engine: str, processes: int, store, args) -> dict | None:
    """One run of train.py on ranks 0 to `processes` - 1; its summary, on rank 0. The other ranks wait for its end.

    medians_ms in it: the steps of each GPU that trained by itself; of several together those that rank 0 saw.
    """
    rank = int(os.environ["RANK"])
    summary, median = None, None
    if rank < processes:
        with tempfile.TemporaryDirectory(prefix="vitkernels_scaling_") as folder:
            with _as_started_for(job, 1 if engine == "none" else processes):
                train_in_this_process(settings(engine, args), Path(folder))
            written = Path(folder) / "summary.json"  # by rank 0, and by each that trains by itself
            if written.exists():
                summary = json.loads(written.read_text())
                median = summary["step_time_ms"]["median"]
    store.set(f"{job}/{rank}", json.dumps(median))
    everyone = [f"{job}/{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(everyone, LONGEST_RUN)
    if rank != 0:
        return None
    medians = [json.loads(store.get(key)) for key in everyone]
    return summary | {"medians_ms": [median for median in medians if median is not None]}


def settings(engine: str, args) -> list[str]:
    name, *more = engine.split(",")
    return [
        f"parallel={name}", *(f"parallel.{one}" for one in more), f"model={args.model}", f"attn={args.attn}",
        "data=fake", f"data.batch_size={args.batch}", f"data.num_classes={args.classes}", "data.pool_batches=2",
        "data.val_items=1", "schedule=constant", f"trainer.max_steps={args.warmup + args.steps}",
        f"trainer.warmup_steps={args.warmup}", "trainer.eval_every=null", "checkpoints.every_epochs=null", *args.set,
    ]  # fmt: skip


def train_in_this_process(overrides: list[str], folder: Path) -> None:
    import torch
    from hydra import compose, initialize_config_dir

    import train

    torch._dynamo.reset()  # each run compiles as a process of its own would, but finds the others' kernels on the disk
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=overrides)
    train.run(cfg, folder)


@contextlib.contextmanager
def _as_started_for(job: int, world: int):
    """torchrun's environment as if it had started `world` processes for this run alone; a world of 1 is rank 0."""
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RESTART_COUNT": f"run_{job}"}
    if world == 1:
        os.environ["RANK"] = "0"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def row(engine: str, alone: bool, summary: dict, args) -> dict:
    from vitkernels.provenance import git_commit, versions

    return {
        "model": args.model, "attn": args.attn, "parallel": engine, "devices": summary["devices"], "alone": alone,
        "batch_size_per_device": args.batch, "device": summary["device"], "precision": summary["precision"],
        "compile": summary["compile"], "ops": summary["ops"], "step_time_ms": summary["step_time_ms"],
        "medians_ms": summary["medians_ms"],
        "peak_memory_bytes": summary["peak_memory_bytes"], "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit(), "versions": versions(),
    }  # fmt: skip


def table(rows: list[dict], batch: int) -> str:
    """Markdown; efficiency is against the row of one device that trained alone."""
    base = next(r["step_time_ms"]["median"] for r in rows if r["parallel"] == "none" and r["alone"])
    heading = ("parallel", "GPUs", "step ms (p10, p90)", "mean", "images/s", "peak GiB per GPU", "efficiency")
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    for one in rows:
        times, count = one["step_time_ms"], one["devices"]
        if not one["alone"]:
            count = f"{count}, others busy; the slowest {max(one['medians_ms']):.2f}"
        lines.append(
            f"| {one['parallel']} | {count} | {times['median']:.2f} ({times['p10']:.2f}, {times['p90']:.2f}) "
            f"| {times['mean']:.2f} | {one['devices'] * batch / times['median'] * 1e3:.0f} "
            f"| {one['peak_memory_bytes'] / 2**30:.1f} | {100 * base / times['median']:.1f} % |"
        )
    return "\n".join(lines)


def jobs(args) -> list[tuple[str, int, bool]]:
    """(engine, processes, whether no other GPU works).

    All GPUs by themselves come first: this also fills the compilation cache, in which each GPU has entries of its own.
    """
    most = max(args.processes)
    several = [(engine, count, True) for count in sorted(args.processes)[::-1] if count > 1 for engine in args.engines]
    return [*([("none", most, False)] if most > 1 else []), ("none", 1, True), *several]


def run_all(args) -> None:
    """In each of torchrun's processes: all runs, one after another; rank 0 writes them down."""
    import torch.distributed as dist

    logging.basicConfig(level=logging.INFO if os.environ["RANK"] == "0" else logging.WARNING, format="%(message)s")
    store = dist.PrefixStore("scaling", next(dist.rendezvous("env://"))[0])
    rows = []
    args.results.parent.mkdir(parents=True, exist_ok=True)
    for number, (engine, count, alone) in enumerate(jobs(args)):
        summary = measure(number, engine, count, store, args)
        if summary is not None:
            rows.append(row(engine, alone, summary, args))
            with open(args.results, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    if rows:
        print(f"\n{args.model}, batch {args.batch} per device, {rows[0]['device']}, {rows[0]['precision']}\n")
        print(table(rows, args.batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_b16_256", help="one of conf/model")
    parser.add_argument("--batch", type=int, default=128, help="images per GPU")
    parser.add_argument("--classes", type=int, default=1024)
    parser.add_argument("--attn", default="triton_flash")
    parser.add_argument("--processes", type=int, nargs="+", help="by default 1, 2, 4, 8 as far as there are GPUs")
    parser.add_argument("--engines", nargs="+", help="ddp or fsdp, and settings after a comma")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--set", nargs="*", default=[], help="more settings of train.py")
    parser.add_argument("--results", type=Path, default=ROOT / "results/scaling.jsonl")
    args = parser.parse_args()
    on_cpu = "runtime=cpu" in args.set
    args.engines = args.engines or (["ddp", "fsdp"] if on_cpu else ["ddp,send=copy", "ddp,send=nccl", "fsdp"])
    gpus = torch.cuda.device_count()
    args.processes = args.processes or [count for count in (1, 2, 4, 8) if count <= gpus]
    if "RANK" in os.environ:
        run_all(args)
        return
    most = max(args.processes, default=1)
    if most == 1 or (not on_cpu and most > gpus):
        wanted = f"{most}, --processes says" if most > 1 else "2 or more"
        parser.error(
            f"it compares several GPUs ({wanted}), and PyTorch sees {gpus} here. "
            "On CPUs: --processes 1 2 --set runtime=cpu, and a small model as in --help"
        )
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={most}"]
    threads = min(4, max(1, os.cpu_count() // most))  # torchrun's own default, 1, makes weights and data slowly
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    main()
