"""The figures a run ends with."""

import logging
from pathlib import Path

from vitkernels.parallel import Parallel
from vitkernels.runtime import Runtime
from vitkernels.training.history import StepRecord
from vitkernels.training.run_log import RunLog
from vitkernels.training.step_timer import Window

log = logging.getLogger(__name__)


def mfu(runtime: Runtime, flops: float, ms: float | None) -> float | None:
    """Model FLOP/s utilisation, 0 to 1: the model's products over what the chip could do; None where unknown.

    Model FLOPs are those of the products in forward and backward, recomputation not counted (PaLM, Chowdhery et al.
    2022, appendix B).
    """
    if ms is None or runtime.peak_flops is None:
        return None
    return round(flops / (ms * 1e-3) / runtime.peak_flops, 5)


def log_window(
    run_log: RunLog,
    parallel: Parallel,
    epoch: int,
    records: list[StepRecord],
    window: Window,
    images: int,
    flops: float,
) -> None:
    """One log boundary: TensorBoard's scalars and a line on the terminal."""
    last = records[-1]
    loss = sum(r.loss for r in records) / len(records)
    scalars = {"train/loss": loss, "train/lr": last.lr, "train/grad_norm": last.grad_norm, "train/epoch": epoch}
    brief = f"loss {loss:.4f}"
    text = f"epoch {epoch + 1}  loss {loss:.4f}  lr {last.lr:.2e}  grad norm {last.grad_norm:.3g}"
    if window.step_ms:
        ms = sum(window.step_ms) / len(window.step_ms)
        wait = sum(window.input_wait_ms) / len(window.input_wait_ms)
        used = mfu(parallel.runtime, flops, ms)
        memory = parallel.runtime.peak_memory_bytes()
        scalars |= {
            "time/step_ms": ms,
            "time/images_per_s": images / ms * 1e3,
            "time/input_wait_ms": wait,
            "time/mfu": used,
            "memory/peak_mib": None if memory is None else memory / 2**20,
        }
        speed = f"  {ms:.1f} ms/step  {images / ms * 1e3:.0f} images/s"
        brief += speed
        text += f"{speed}  input wait {wait:.1f} ms"
        text += "" if used is None else f"  MFU {100 * used:.1f} %"
    run_log.scalars(last.step, scalars)
    run_log.show(last.step, text, brief)


def log_evaluation(result: dict) -> None:
    """One line of what `evaluate` gave; of a quantized model, beside what it was before."""
    speed = "" if result["images_per_s"] is None else f", {result['images_per_s']:.1f} images/s"
    log.info("top-1 %.2f %%  top-5 %.2f %%  on %d images%s", result["top1"], result["top5"], result["images"], speed)
    if "top1_before" not in result:
        return
    speed = "" if speed == "" else f", {result['images_per_s_before']:.1f} -> {result['images_per_s']:.1f} images/s"
    change = result["top1"] - result["top1_before"]
    log.info(
        "quantized: top-1 %.2f -> %.2f %% (%+.2f points), %.2f -> %.2f MB%s",
        result["top1_before"], result["top1"], change, result["bytes_before"] / 1e6, result["bytes"] / 1e6, speed,
    )  # fmt: skip


def report(summary: dict, folder: Path) -> None:
    """The summary's main figures as the run's last lines."""
    times = summary["step_time_ms"]
    if times["n"]:
        used = "unknown for this device" if summary["mfu"] is None else f"{100 * summary['mfu']:.1f} %"
        log.info(
            "average step time %.2f ms over %d steps (median %.2f, p10 %.2f, p90 %.2f), %.1f images/s, MFU %s",
            times["mean"], times["n"], times["median"], times["p10"], times["p90"], summary["images_per_s"], used,
        )  # fmt: skip
    else:
        log.info("no step was timed: training was no longer than trainer.warmup_steps")
    if summary["val_top1"] is not None:
        of_ema = "" if summary["val_ema_top1"] is None else f"; of the EMA top-1 {summary['val_ema_top1']:.2f} %"
        log.info("val top-1 %.2f %%  top-5 %.2f %%%s", summary["val_top1"], summary["val_top5"], of_ema)
    log.info("done in %.0f s: %s", summary["seconds"], folder / "summary.json")
