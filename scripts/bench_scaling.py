"""Measure how training scales over the GPUs of one host, with DDP and FSDP on fake data, so that input never limits.

    python scripts/bench_scaling.py                                  ViT-B/16 at 256 px, batch 128 per GPU, 1 to 8 GPUs
    python scripts/bench_scaling.py --model vit_digits --classes 10 --batch 8 --steps 8 --warmup 6 --processes 1 2 \\
        --set runtime=cpu --attn sdpa --results /tmp/scaling.jsonl   anywhere, to try it out
    python scripts/bench_scaling.py --engines ddp fsdp,gather=bf16   with settings of conf/parallel; the default on GPUs
                                                                     is both gradient transports of ddp, and fsdp

Weak scaling: the batch per GPU stays the same. Efficiency is the median step of one GPU alone, without any strategy,
divided by that of N GPUs. All GPUs are also measured at the same time, each training alone: this shows how much they
share power and the host, and which GPU is the slowest, for which the others would wait.
torchrun starts the processes once; processes that a run does not need wait. Rows are appended to
results/scaling.jsonl.
"""

import argparse
import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
LONGEST_RUN = timedelta(minutes=20)


def measure(job: int, engine: str, processes: int, store, args) -> dict | None:
    """Train on ranks 0 to `processes` - 1 and return the summary on rank 0; the other ranks wait.

    The summary gets medians_ms: the median step of each GPU that trained alone, or of rank 0 if several trained
    together.
    """
    rank = int(os.environ["RANK"])
    summary, median = None, None
    if rank < processes:
        with _environment_of(job, 1 if engine == "none" else processes):
            summary = train_in_this_process(settings(engine, args))
        if rank == 0 or engine == "none":
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


def train_in_this_process(overrides: list[str]) -> dict:
    """Train without a run folder, and return the summary."""
    from vitkernels import parallel, runtime
    from vitkernels.config.compose import compose
    from vitkernels.training import result, setup

    torch._dynamo.reset()  # compile as a new process would, but reuse the kernels that are on disk
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    cfg = compose(overrides)
    device = runtime.create(cfg.runtime.name, cfg.runtime.precision)
    options = vars(cfg.parallel)
    with parallel.create(runtime=device, accum_steps=cfg.trainer.accum_steps, **options) as strategy:
        setup.log_runtime(cfg, strategy)
        trainer, parts = setup.trainer_from_config(cfg, strategy)
        trainer.fit()
        return result.run_summary(cfg, trainer, parts)


@contextlib.contextmanager
def _environment_of(job: int, world: int):
    """Set torchrun's environment as if it had started `world` processes for this run alone; a world of 1 is rank 0."""
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
    """Return the rows as Markdown; efficiency is relative to one device that trained alone."""
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
    """Return (engine, processes, whether all other GPUs are idle) of each run.

    All GPUs training alone come first, which also fills the compilation cache: each GPU has its own entries there.
    """
    most = max(args.processes)
    several = [(engine, count, True) for count in sorted(args.processes)[::-1] if count > 1 for engine in args.engines]
    return [*([("none", most, False)] if most > 1 else []), ("none", 1, True), *several]


def run_all(args) -> None:
    """Run everything, in each of torchrun's processes; rank 0 writes the results."""
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
