"""Report figures: one line per log window, the result of an evaluation, and the summary of a complete run."""

import logging
from pathlib import Path

from vitkernels.parallel import Parallel
from vitkernels.runtime import Runtime
from vitkernels.training.loggers import MetricLogger
from vitkernels.training.metrics import StepRecord
from vitkernels.training.plan import StepPlan
from vitkernels.training.step_timer import Window

log = logging.getLogger("vitkernels")


def mfu(runtime: Runtime, flops: float, ms: float | None) -> float | None:
    """Return model FLOP/s utilization, 0 to 1, or None if the chip's peak or the time is unknown.

    Model FLOPs are those of the matrix products in forward and backward, without recomputation (PaLM, Chowdhery et al.
    2022, arXiv 2204.02311, appendix B).
    """
    if ms is None or runtime.peak_flops is None:
        return None
    return round(flops / (ms * 1e-3) / runtime.peak_flops, 5)


def log_window(
    logger: MetricLogger,
    parallel: Parallel,
    plan: StepPlan,
    records: list[StepRecord],
    window: Window,
    flops: float,
) -> None:
    """Log one window: scalars, and a line for the terminal. flops: model FLOPs of a step on one device."""
    last, epoch = records[-1], plan.epoch_of(records[-1].step) + 1
    loss = sum(r.loss for r in records) / len(records)
    scalars: dict[str, float | None]
    scalars = {"train/loss": loss, "train/lr": last.lr, "train/grad_norm": last.grad_norm, "train/epoch": epoch}
    brief = f"loss {loss:.4f}"
    text = f"epoch {epoch}  loss {loss:.4f}  lr {last.lr:.2e}  grad norm {last.grad_norm:.3g}"
    if window.step_ms:
        ms = sum(window.step_ms) / len(window.step_ms)
        split = window.split()
        used = mfu(parallel.runtime, flops, ms)
        memory = parallel.runtime.peak_memory_bytes()
        images_per_s = plan.images_per_step / ms * 1e3
        scalars |= {
            "time/step_ms": ms,
            "time/images_per_s": images_per_s,
            **{f"time/{name}": part for name, part in split.items()},
            "time/mfu": used,
            "memory/peak_mib": None if memory is None else memory / 2**20,
        }
        brief += f"  {ms:.1f} ms/step  {images_per_s:.0f} images/s"
        text += f"  {ms:.1f} ms/step{_split_text(split)}  {images_per_s:.0f} images/s"
        text += "" if used is None else f"  MFU {100 * used:.1f} %"
    logger.scalars(last.step, scalars)
    logger.window(last.step, text, brief)


def _split_text(split: dict[str, float | None]) -> str:
    """Return what a step's time was spent on, as part of a log line."""
    names = {"input_wait_ms": "input", "host_late_ms": "host", "device_busy_ms": "device", "rest_ms": "rest"}
    known = [f"{names[name]} {ms:.1f}" for name, ms in split.items() if ms is not None]
    return f" = {' + '.join(known)}" if len(known) == len(names) else f" ({', '.join(known)} ms)"


def log_evaluation(result: dict, num_classes: int) -> None:
    """Log what `evaluate` returned; for a quantized model, also the figures before quantization.

    Top-5 accuracy is logged with more than five classes.
    """
    speed = "" if result["images_per_s"] is None else f", {result['images_per_s']:.1f} images/s"
    top5 = f"  top-5 {result['top5']:.2f} %" if num_classes > 5 else ""
    loss = f"  loss {result['loss']:.4f}" if "loss" in result else ""
    ece = f"  calibration error {result['ece']:.2f} %" if "ece" in result else ""
    precision = f"mAP {result['map']:.2f} %  " if "map" in result else ""
    figures = f"{precision}top-1 {result['top1']:.2f} %{top5}{loss}{ece}"
    log.info("%s  on %d images%s", figures, result["images"], speed)
    if "top1_before" not in result:
        return
    speed = "" if speed == "" else f", {result['images_per_s_before']:.1f} -> {result['images_per_s']:.1f} images/s"
    change = result["top1"] - result["top1_before"]
    log.info(
        "quantized: top-1 %.2f -> %.2f %% (%+.2f points), %.2f -> %.2f MB%s",
        result["top1_before"], result["top1"], change, result["bytes_before"] / 1e6, result["bytes"] / 1e6, speed,
    )  # fmt: skip


def log_summary(summary: dict, folder: Path, num_classes: int) -> None:
    """Log a run's main figures as its last lines; top-5 accuracy means something only with more than five classes."""
    times = summary["step_time_ms"]
    if summary["interpreted"]:
        log.warning(
            "kernels ran in %s: these times say nothing about their speed", " and ".join(summary["interpreted"])
        )
    if times["n"]:
        used = "unknown for this device" if summary["mfu"] is None else f"{100 * summary['mfu']:.1f} %"
        log.info(
            "average step time %.2f ms over %d steps (median %.2f, p10 %.2f, p90 %.2f), %.1f images/s, MFU %s",
            times["mean"], times["n"], times["median"], times["p10"], times["p90"], summary["images_per_s"], used,
        )  # fmt: skip
    else:
        log.info("no step was timed: training ended within the first trainer.warmup_steps steps, which are not timed")
    if summary["val_top1"] is not None:
        of_ema = "" if summary["val_ema_top1"] is None else f"; EMA top-1 {summary['val_ema_top1']:.2f} %"
        top5 = f"  top-5 {summary['val_top5']:.2f} %" if num_classes > 5 else ""
        precision = f"mAP {summary['val_map']:.2f} %  " if "val_map" in summary else ""
        figures = f"{precision}top-1 {summary['val_top1']:.2f} %{top5}"
        log.info("val %s  loss %.4f%s", figures, summary["val_loss"], of_ema)
    if (best := summary["best"]) is not None:
        more = f"  loss {best['loss']:.4f}  epoch {best['epoch']:g}" if "loss" in best else ""  # older runs lack them
        log.info("best top-1 %.2f %%%s  step %d: %s", best["top1"], more, best["step"], folder / best["weights"])
    log.info("done in %.0f s: %s", summary["seconds"], folder / "summary.json")
