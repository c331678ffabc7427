"""Measure the input pipeline: loaders alone, training on image files against data=fake, and evaluations of a folder.

Shapes: B batch, S image side.
"""

import io
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import create_loader
from torchvision.datasets import ImageFolder

from vitkernels import models, parallel, runtime
from vitkernels.benchmarks.scaling import train_in_this_process
from vitkernels.config.compose import compose
from vitkernels.data import Batch, Data, imagefolder
from vitkernels.data.device_transforms import finished
from vitkernels.data.workers import process_context
from vitkernels.training import setup
from vitkernels.training.evaluate import evaluate

CLASSES = 10
BATCHES_AHEAD = 2  # that each worker of a DataLoader prepares
_ONLY_STEPS = ("trainer.eval_every=null", "checkpoints.every_epochs=null")


def make_jpegs(root: Path, count: int, width: int, height: int) -> float:
    """Write `count` procedural JPEG files as ROOT/train and ROOT/val (one in ten); return their mean size in bytes.

    Sums of coarse noise at three scales, quality 80 to 95: about 70 KB at 500 × 375, as ImageNet's photos have. ROOT
    appears once all are written.
    """
    partial_root = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial_root, ignore_errors=True)  # of an interrupted call
    with ProcessPoolExecutor(mp_context=process_context()) as pool:
        sizes = list(pool.map(partial(_write_jpeg, partial_root, width, height), range(count), chunksize=32))
    partial_root.rename(root)
    return float(np.mean(sizes))


def count_jpegs(root: Path) -> int:
    """Return the number of files that `make_jpegs` wrote below ROOT, without the links of `lengthen`."""
    return sum("_" not in image.stem for split in ("train", "val") for image in (root / split).glob("*/*.jpg"))


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


def lengthen(root: Path, count: int) -> None:
    """Add links to the images in ROOT/train until it holds `count`.

    The epoch then lasts as long as a measurement: between epochs, the workers' queues run empty.
    """
    images = sorted((root / "train").glob("*/*.jpg"))
    originals = [image for image in images if "_" not in image.stem]
    if not originals:
        raise ValueError(f"{root / 'train'} holds no images to link to")
    missing = max(0, count - len(images))
    ahead = len(images) // len(originals)
    links = (image.with_stem(f"{image.stem}_{copy}") for copy in itertools.count(ahead) for image in originals)
    for link in itertools.islice((link for link in links if not link.exists()), missing):
        link.hardlink_to(link.with_stem(link.stem.partition("_")[0]))


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


def timm_loader(root: Path, batch_size: int, image_size: int, workers: int) -> Any:
    """Return timm's own loader with the same augmentation; with its prefetcher if there is a GPU."""
    on_gpu = torch.cuda.is_available()
    return create_loader(
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


def timm_batches(root: Path, batch_size: int, image_size: int, workers: int) -> Iterator:
    """Yield batches of timm's loader, epoch after epoch."""
    loader = timm_loader(root, batch_size, image_size, workers)
    while True:
        yield from loader


class TimmLoader:
    """timm's loader as a Loader of this package: the peer that the same trainer trains on."""

    def __init__(self, loader: Any, batch_size: int):
        self.loader, self.batch_size = loader, batch_size
        self.batches_per_epoch = len(loader)
        self.num_samples = self.batches_per_epoch * batch_size
        self.bad_images: dict[str, str] = {}

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        return itertools.islice(iter(self.loader), start, None)

    def sample_ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        return []

    def describe(self, ids: list[int]) -> list[str]:
        return []


def timm_data(*, root: str, image_size: int, batch_size: int, num_workers: int, **settings: Any) -> Data:
    """Return a data set whose training split comes from timm's loader, for data._target_."""
    val = imagefolder.build(
        root=root, image_size=image_size, batch_size=batch_size, num_workers=0, check_images=0, train=False,
        **{name: settings[name] for name in ("in_chans", "seed")},
    )  # fmt: skip
    return Data(
        TimmLoader(timm_loader(Path(root), batch_size, image_size, num_workers), batch_size),
        val.val, num_classes=val.num_classes, class_names=val.class_names, preprocessing=val.preprocessing,
    )  # fmt: skip


def queued_batches(workers: int) -> int:
    """Return how many batches to discard before a measurement: those that workers prepared while nobody asked."""
    return BATCHES_AHEAD * workers + 4


def rates(
    pipelines: dict[str, Callable[[], Iterator]], seconds: float, rounds: int, workers: int
) -> Iterator[tuple[str, list[float]]]:
    """Yield images/s of each pipeline in each round; pipelines run in turns, so drift affects all equally.

    If one fails, the rounds that each has finished are yielded before the error is raised.
    """
    open_pipelines = {name: make() for name, make in pipelines.items()}
    found: dict[str, list[float]] = {name: [] for name in pipelines}
    try:
        for number in range(rounds):
            for name, batches in open_pipelines.items():
                for _ in range(queued_batches(workers)):
                    next(batches)
                found[name].append(_rate(batches, seconds))
                if number == rounds - 1:
                    yield name, found.pop(name)
    except Exception:
        yield from ((name, each) for name, each in found.items() if each)
        raise


def _rate(batches: Iterator, seconds: float) -> float:
    images, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        images += len(next(batches)[1])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return images / (time.perf_counter() - begin)


def check_settings(runs: Sequence[list[str]]) -> None:
    """Raise UsageError for settings that training would refuse, in seconds and without files, weights or a GPU.

    The model is built once: the runs have the same.
    """
    configs = [compose([*overrides, *_ONLY_STEPS]) for overrides in runs]
    model = configs[0].model
    image_size, in_chans = models.input_spec(model.name, model.img_size, model.in_chans)
    models.inspect_model(
        lambda backend: models.create_model(
            model.name, backend, img_size=model.img_size, in_chans=in_chans, drop_path_rate=model.drop_path_rate,
            **model.kwargs,
        ),
        image_size=image_size, in_chans=in_chans, batch_size=1, dtype=torch.float32, device_type="cpu",
    )  # fmt: skip


def training_summary(overrides: list[str]) -> dict[str, Any]:
    """Return the summary of training with these settings; its images_per_s is that of the mean step."""
    return train_in_this_process([*overrides, *_ONLY_STEPS])


def file_settings(root: Path) -> list[str]:
    """Return the settings that choose the files below `root`."""
    return ["data=imagefolder", f"data.root={root}", "data.check_images=0"]


def evaluation_rates(root: Path, overrides: list[str], passes: int) -> list[float]:
    """Return images/s, input included, of each pass of evaluating the model on all images below `root`.

    An untimed first pass compiles, starts the workers and reads the files into the page cache.
    """
    _link_as_evaluation(root)
    cfg = compose([*overrides, *file_settings(root / "evaluation"), *_ONLY_STEPS])
    device = runtime.create(cfg.runtime.name, cfg.runtime.precision)
    found = []
    with parallel.create(runtime=device, **vars(cfg.parallel)) as strategy:
        trainer, _ = setup.trainer_from_config(cfg, strategy)
        loader = trainer.data.val
        for number in range(passes + 1):
            begin = time.perf_counter()
            evaluate(trainer.net, loader, strategy)
            if number:
                found.append(loader.num_samples / (time.perf_counter() - begin))
    return found


def _link_as_evaluation(root: Path) -> None:
    """Create ROOT/evaluation, each of whose two splits holds every image of ROOT."""
    images = [image for split in ("train", "val") for image in (root / split).glob("*/*.jpg")]
    for target, image in itertools.product(("train", "val"), images):
        link = root / "evaluation" / target / image.parent.name / image.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.hardlink_to(image)


def _moved(batch, device: str):
    move = partial(torch.Tensor.to, device=device, non_blocking=True)
    return {name: move(x) for name, x in batch.items()} if isinstance(batch, dict) else tuple(map(move, batch))
