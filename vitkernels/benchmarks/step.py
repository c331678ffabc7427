"""Time bare training steps, without trainer, data loading or logging, as a baseline for train.py and other models."""

import gc
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.optim import with_kernel
from vitkernels.provenance import git_commit, versions
from vitkernels.runtime import Runtime


@dataclass
class StepTimes:
    """Percentiles of the times of n steps in ms, peak memory in bytes, and seconds until the first timed step.

    losses: those of the steps of `train_on_synthetic`, if it was run.
    first_step_s: seconds to the end of the first step: from the start of the process for train.py, which imports,
        builds and compiles, and without building the model for the others.
    """

    variant: str
    median: float
    p10: float
    p90: float
    n: int
    peak_memory_bytes: int | None
    warmup_seconds: float | None
    final_loss: float
    losses: list[float] | None = None
    first_step_s: float | None = None


def bare_loop(
    variant: str,
    runtime: Runtime,
    model: nn.Module,
    *,
    image_size: int,
    batch_size: int,
    num_classes: int,
    in_chans: int = 3,
    warmup: int = 20,
    steps: int = 80,
    lr: float = 1e-3,
    adamw: str = "eager",
) -> StepTimes:
    """Time steps of forward, cross-entropy, backward and AdamW on one random batch that stays on the device.

    A step lasts from the end of the previous one to its own end.

    Args:
        model: on the runtime's device, compiled or not.
        adamw: the kernel of the optimizer as in `optim.with_kernel`; "eager" is torch's.
    """
    torch.manual_seed(0)
    optimizer = _optimizer(runtime, model, lr, adamw)
    images = torch.randn(batch_size, in_chans, image_size, image_size, device=runtime.device)
    targets = torch.randint(0, num_classes, (batch_size,), device=runtime.device)

    def step() -> Tensor:
        return _train_step(runtime, model, optimizer, images, targets)

    begin = time.perf_counter()
    if runtime.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(runtime.device)
    step()
    runtime.synchronize()
    first_step_s = round(time.perf_counter() - begin, 3)
    for _ in range(warmup - 1):
        step()
    runtime.synchronize()
    warmup_seconds = time.perf_counter() - begin
    stamps = [runtime.stamp()]
    for _ in range(steps):
        loss = step()
        stamps.append(runtime.stamp())
    runtime.synchronize()
    times = [runtime.elapsed_ms(a, b) for a, b in itertools.pairwise(stamps)]
    p10, median, p90 = (round(float(t), 4) for t in np.percentile(times, [10, 50, 90]))
    memory = runtime.peak_memory_bytes()
    return StepTimes(
        variant, median, p10, p90, steps, memory, round(warmup_seconds, 1), float(loss.detach()),
        first_step_s=first_step_s,
    )  # fmt: skip


def _optimizer(runtime: Runtime, model: nn.Module, lr: float, adamw: str) -> torch.optim.Optimizer:
    options = {"lr": lr, "weight_decay": 0.05, **runtime.optimizer_kwargs("adamw")}
    return with_kernel(torch.optim.AdamW(model.parameters(), **options), adamw)


def _train_step(runtime: Runtime, model: nn.Module, optimizer, images: Tensor, targets: Tensor) -> Tensor:
    """Take one step and return its loss."""
    with runtime.autocast():
        logits = model(images)
    loss = F.cross_entropy(logits.float(), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    runtime.end_step(images, targets)
    return loss


def train_on_synthetic(
    runtime: Runtime, model: nn.Module, start: dict[str, Tensor], *,
    image_size: int, batch_size: int, num_classes: int, in_chans: int = 3, steps: int = 200, lr: float = 1e-4,
    adamw: str = "eager",
) -> list[float]:  # fmt: skip
    """Train from the state dict `start` on learnable synthetic images; return the loss of each step.

    Each class, of at most 256, is one random picture of 16 × 16 pixels, enlarged. Each image is the picture of its
    class with fresh noise, so that no image can be memorized (memorization amplifies tiny rounding differences).
    Trains with AdamW and 20 steps of warm-up. The same arguments give the same images on the same device.
    """
    getattr(model, "_orig_mod", model).load_state_dict(start)
    optimizer = _optimizer(runtime, model, lr, adamw)
    random = torch.Generator(device=runtime.device).manual_seed(0)
    classes = min(num_classes, 256)
    pictures = torch.randn(classes, in_chans, 16, 16, device=runtime.device, generator=random)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (step + 1) / 20)
        targets = torch.randint(classes, (batch_size,), device=runtime.device, generator=random)
        images = F.interpolate(pictures[targets], size=(image_size, image_size))
        images += 1.5 * torch.randn(images.shape, device=runtime.device, generator=random)
        loss = _train_step(runtime, model, optimizer, images, targets)
        losses.append(loss.detach().clone())  # the next replay of a CUDA graph overwrites its results
    return torch.stack(losses).tolist()


def free(runtime: Runtime) -> None:
    """Release compiled graphs and cached memory, so that the next variant starts in the same state as the first."""
    torch._dynamo.reset()
    gc.collect()  # reference cycles would count in the next variant's peak memory
    if runtime.device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Variant:
    """A model to time: how to build it, the kernel of its optimizer, and whether to compare its losses."""

    name: str
    build: Callable[[], nn.Module]
    adamw: str = "eager"
    compare_losses: bool = False


def run_variants(
    variants: Iterable[Variant], runtime: Runtime, learning_steps: int = 0, *, warmup: int, steps: int, **sizes
) -> Iterator[StepTimes]:
    """Yield the step times of each variant in turn; a variant that fails is reported and skipped.

    Variants with `compare_losses` are also trained for `learning_steps` steps by `train_on_synthetic`, all from the
    initial weights of the first variant. `sizes` are passed to `bare_loop`.
    """
    start = None
    for variant in variants:
        free(runtime)
        row = model = None
        try:
            model = variant.build()
            start = start or _state_on_host(model)
            row = bare_loop(variant.name, runtime, model, warmup=warmup, steps=steps, adamw=variant.adamw, **sizes)
            print(f"{variant.name}: {row.median:.2f} ms ({row.p10:.2f}, {row.p90:.2f})", flush=True)
            if learning_steps and variant.compare_losses:
                row.losses = train_on_synthetic(
                    runtime, model, start, steps=learning_steps, adamw=variant.adamw, **sizes
                )
        except (RuntimeError, ValueError) as error:
            print(f"{variant.name}: failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
        del model  # before the next variant needs the memory
        if row is not None:
            yield row


def _state_on_host(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state in host memory, so that it does not count in any variant's peak memory."""
    state = getattr(model, "_orig_mod", model).state_dict()
    return {key: value.to("cpu", copy=True) for key, value in state.items()}


def table(rows: list[StepTimes], batch_size: int, baseline: str) -> str:
    """Return the rows as Markdown; the last column is the median divided by the baseline's, so below 1 is faster."""
    base = next((row.median for row in rows if row.variant == baseline), None)
    headings = ("variant", "step ms (p10, p90)", "images/s", "peak GiB", "first step s", f"time / {baseline}")
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for row in rows:
        memory = "–" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.1f}"
        ratio = "–" if base is None else f"{row.median / base:.3f}"
        times = f"{row.median:.2f} ({row.p10:.2f}, {row.p90:.2f})"
        first = "–" if row.first_step_s is None else f"{row.first_step_s:.1f}"
        lines.append(
            f"| {row.variant} | {times} | {batch_size / row.median * 1e3:.0f} | {memory} | {first} | {ratio} |"
        )
    return "\n".join(lines)


def losses_table(rows: list[StepTimes], baseline: str, window: int = 25) -> str:
    """Return mean losses per window of steps as Markdown: the baseline's, and the others' differences in percent."""
    rows = [row for row in rows if row.losses]
    losses_of = {row.variant: row.losses or [] for row in rows}
    parts_of = {name: torch.tensor(losses).split(window) for name, losses in losses_of.items()}
    means = {name: [part.mean().item() for part in parts] for name, parts in parts_of.items()}
    if baseline not in means:
        return ""
    ends = [min((i + 1) * window, len(losses_of[rows[0].variant])) for i in range(len(means[baseline]))]
    lines = [f"| loss up to step | {' | '.join(map(str, ends))} | all |", "|---" * (len(ends) + 2) + "|"]
    overall_of = {name: [*means[name], sum(losses) / len(losses)] for name, losses in losses_of.items()}
    reference = overall_of[baseline]
    for row in rows:
        overall = overall_of[row.variant]
        if row.variant == baseline:
            cells = [f"{x:.4f}" for x in overall]
        else:
            cells = [f"{100 * (x / y - 1):+.2f} %" for x, y in zip(overall, reference, strict=True)]
        lines.append(f"| {row.variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def append_results(path: Path, rows: list[StepTimes], context: dict) -> None:
    """Append one JSON line per row, with the date, the package versions and the commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    when = {"date": time.strftime("%Y-%m-%d"), "commit": git_commit(), "versions": versions()}
    with open(path, "a") as file:
        for row in rows:
            file.write(json.dumps({**context, **asdict(row), **when}) + "\n")
