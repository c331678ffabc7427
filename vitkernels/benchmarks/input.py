"""Measure the input pipeline: loaders alone, and training on image files against data=fake.

Shapes: B batch, S image side.
"""

import io
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_loader
from torchvision.datasets import ImageFolder

from vitkernels.benchmarks.scaling import train_in_this_process
from vitkernels.data import imagefolder
from vitkernels.data.device_transforms import finished

CLASSES = 10


def make_jpegs(root: Path, count: int, width: int, height: int) -> float:
    """Write `count` procedural JPEG files as ROOT/train and ROOT/val (one in ten); return their mean size in bytes.

    Sums of coarse noise at three scales, quality 80 to 95: about 70 KB at 500 × 375, as ImageNet's photos have.
    """
    with ProcessPoolExecutor() as pool:
        sizes = list(pool.map(partial(_write_jpeg, root, width, height), range(count), chunksize=32))
    return float(np.mean(sizes))


def _write_jpeg(root: Path, width: int, height: int, number: int) -> int:
    draw = np.random.default_rng(number)
    pixels = np.zeros((height, width, 3), np.float32)
    for cells, share in ((12, 0.5), (60, 0.25), (250, 0.25)):
        coarse = draw.integers(0, 255, (max(1, cells * height // width), cells, 3), dtype=np.uint8)
        resized = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels += share * np.asarray(resized, np.float32)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=int(draw.integers(80, 96)))
    folder = root / ("val" if number % 10 == 0 else "train") / f"c{number // 10 % CLASSES:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number}.jpg").write_bytes(file.getvalue())
    return len(file.getvalue())


def loader_batches(root: Path, batch_size: int, image_size: int, workers: int, **settings) -> Iterator:
    """Yield finished batches of imagefolder's training split, epoch after epoch, on the GPU if there is one."""
    spec = {"image_size": image_size, "in_chans": 3, "seed": 0, "batch_size": batch_size, "num_workers": workers}
    loader = imagefolder.build(
        root=str(root), **spec, pin_memory=torch.cuda.is_available(), check_images=0, **settings
    ).train
    assert loader is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for epoch in itertools.count():
        moved = (_moved(batch, device) for batch in loader.epoch(epoch))
        yield from finished(loader, moved)


def timm_batches(root: Path, batch_size: int, image_size: int, workers: int) -> Iterator:
    """Yield batches of timm's own loader with the same augmentation; with its prefetcher if there is a GPU."""
    on_gpu = torch.cuda.is_available()
    loader = create_loader(
        ImageFolder(root / "train"),
        (3, image_size, image_size),
        batch_size,
        is_training=True,
        use_prefetcher=on_gpu,
        interpolation="bicubic",
        color_jitter=0.0,
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cuda" if on_gpu else "cpu"),
    )
    while True:
        yield from loader


def rates(pipelines: dict[str, Callable[[], Iterator]], seconds: float, rounds: int) -> dict[str, list[float]]:
    """Return images/s of each pipeline in each round; pipelines take turns, so that all meet the machine's moods."""
    open_pipelines = {name: make() for name, make in pipelines.items()}
    found: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(rounds):
        for name, batches in open_pipelines.items():
            for _ in range(4):  # its workers waited with full queues while the others ran
                next(batches)
            found[name].append(_rate(batches, seconds))
    return found


def _rate(batches: Iterator, seconds: float) -> float:
    images, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        images += len(next(batches)[1])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return images / (time.perf_counter() - begin)


def training_rate(overrides: list[str]) -> float:
    """Return images/s of training with these settings, from the median step."""
    summary = train_in_this_process([*overrides, "trainer.eval_every=null", "checkpoints.every_epochs=null"])
    return summary["images_per_s"]


def _moved(batch, device: str):
    move = partial(torch.Tensor.to, device=device, non_blocking=True)
    return {name: move(x) for name, x in batch.items()} if isinstance(batch, dict) else tuple(map(move, batch))
