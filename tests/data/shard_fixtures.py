"""Write small shards as other programs do."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vitkernels.data import shards

SIDE = 24


def encoded(seed: int, form: str = "jpeg", size: tuple[int, int] = (40, 36)) -> bytes:
    """Return an encoded image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def samples(numbers, classes: int = 3) -> list[tuple[str, bytes]]:
    """Return the members of samples with these numbers; the number is seed, name and, modulo classes, class."""
    return [
        member
        for n in numbers
        for member in ((f"{n:06d}.jpg", encoded(n)), (f"{n:06d}.cls", str(n % classes).encode()))
    ]


def write_tars(root: Path, train: int = 21, val: int = 9, per_shard: int = 6) -> Path:
    """Write train-00000.tar, … and val-00000.tar, … with images numbered on from one split to the other."""
    for split, numbers in (("train", range(train)), ("val", range(train, train + val))):
        for shard, first in enumerate(range(0, len(numbers), per_shard)):
            write_tar(root / f"{split}-{shard:05d}.tar", samples(numbers[first : first + per_shard]))
    return root


def write_parquet(path: Path, numbers, labels: pa.Array | None = None, **options) -> Path:
    """Write a Parquet file as the `datasets` library does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = list(numbers)
    images = [{"bytes": encoded(n), "path": f"{n}.jpg"} for n in numbers]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    labels = pa.array([n % 3 for n in numbers], pa.int64()) if labels is None else labels
    table = pa.table({"image": pa.array(images, kind), "label": labels})
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": list("abc")}}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, **{"compression": "none", "row_group_size": 5} | options)
    return path


def build(root, **kwargs):
    given = {"image_size": SIDE, "in_chans": 3, "seed": 0, "batch_size": 4, "num_workers": 0}
    return shards.build(**given | {"root": root and str(root)} | kwargs)
