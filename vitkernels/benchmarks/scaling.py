"""Measure how training scales over the GPUs of one host, in the processes that torchrun starts.

`args` are the parsed arguments of scripts/bench_scaling.py.
"""

import contextlib
import gc
import json
import logging
import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vitkernels import parallel, runtime
from vitkernels.config.compose import compose
from vitkernels.provenance import git_commit, versions
from vitkernels.training import result, setup

_TIMEOUT = timedelta(minutes=20)  # of one run


def measure(job: int, engine: str, processes: int, store, args) -> dict | None:
    """Train on ranks 0 to `processes` - 1 and return the summary on rank 0; the other ranks wait.

    The summary gets medians_ms: the median step of each GPU that trained alone, or of rank 0 if several trained
    together.
    """
    rank = int(os.environ["RANK"])
    summary: Any = None
    median = None
    if rank < processes:
        with _environment_of(job, 1 if engine == "none" else processes):
            summary = train_in_this_process(settings(engine, args))
        if rank == 0 or engine == "none":
            median = summary["step_time_ms"]["median"]
    store.set(f"{job}/{rank}", json.dumps(median))
    everyone = [f"{job}/{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(everyone, _TIMEOUT)
    if rank != 0:
        return None
    medians = [json.loads(store.get(key)) for key in everyone]
    return summary | {"medians_ms": [median for median in medians if median is not None]}


def settings(engine: str, args) -> list[str]:
    """Return the overrides of a run; `engine` is a strategy and settings of conf/parallel, separated by commas."""
    name, *more = engine.split(",")
    return [
        f"parallel={name}", *(f"parallel.{one}" for one in more), f"model={args.model}", f"attn={args.attn}",
        "data=fake", f"data.batch_size={args.batch}", f"data.num_classes={args.classes}", "data.pool_batches=2",
        "data.val_items=1", "schedule=constant", f"trainer.max_steps={args.warmup + args.steps}",
        f"trainer.warmup_steps={args.warmup}", "trainer.eval_every=null", "checkpoints.every_epochs=null", *args.set,
    ]  # fmt: skip


def train_in_this_process(overrides: list[str]) -> dict:
    """Train without a run folder, and return the summary."""
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
    """Set torchrun's environment as if it had started `world` processes for this run; a world of 1 is rank 0."""
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
    """Return the row of a run for the results file."""
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

    The run with all GPUs training alone comes first, because it fills the compilation cache of every GPU.
    """
    most = max(args.processes)
    several = [(engine, count, True) for count in sorted(args.processes)[::-1] if count > 1 for engine in args.engines]
    return [*([("none", most, False)] if most > 1 else []), ("none", 1, True), *several]


def run_all(args) -> None:
    """Run all jobs, in each of torchrun's processes; rank 0 writes the results and prints the table."""
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
