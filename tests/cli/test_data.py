"""vitkernels data shard and data check: what they write, resume and find."""

import errno
import json
import sys
from pathlib import Path

import pytest
from expecting import error
from finished_batches import finished_epoch

from vitkernels.cli import data as command
from vitkernels.data import imagefolder, shards
from vitkernels.data.shard_files import check as checking
from vitkernels.data.shard_files import write

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from shard_fixtures import encoded, write_parquet, write_tars

GIVEN = {"image_size": 24, "in_chans": 3, "seed": 0, "batch_size": 4, "num_workers": 0}


@pytest.fixture
def photos(tmp_path):
    """A folder of two classes, with names that collide without their suffix and names with dots."""
    root = tmp_path / "photos"
    for split, count in (("train", 8), ("val", 3)):
        for number, name in enumerate(("cat", "dog")):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                form = ("jpeg", "png")[i % 2]
                path = root / split / name / f"v1.0 {i // 2}.{form}"
                path.write_bytes(encoded(number * 100 + i, form))
    return root


def shard(*words) -> int:
    return command.main(["shard", *map(str, words), "--shard-mb", "0.01"])


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file but the indexes, whose metadata safetensors writes in any order."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}


def test_data_shard__contains_the_images_of_the_folder(photos, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert shard(photos, tmp_path / "out") == 0
    assert "train: 16 images of 2 classes in" in capsys.readouterr().out
    folder = imagefolder.build(root=str(photos), **GIVEN)
    data = shards.build(root=str(tmp_path / "out"), **GIVEN)
    assert data.class_names == folder.class_names == ["cat", "dog"]
    for split in ("train", "val"):
        own, theirs = (getattr(d, split)._batches.samples.source for d in (data, folder))
        images = [{source.read(i): source.targets[i] for i in range(len(source.targets))} for source in (own, theirs)]
        assert images[0] == images[1] and len(images[0]) == len(own.targets)
        assert own.index.shards[0].size < 30_000 and len(own.index.shards) > 1
    names = sorted(name.rpartition(": ")[2] for name in data.train.describe(list(range(16))))
    assert names[:3] == ["cat/v1_0 0", "cat/v1_0 0-2", "cat/v1_0 1"]
    assert len({targets.item() for _, batch in finished_epoch(data.train, 0) for targets in batch[:1]}) == 2


def test_data_shard__continues_and_writes_identical_bytes(photos, tmp_path, monkeypatch):
    assert shard(photos, tmp_path / "whole") == 0
    written = []
    original = write._write_shard

    def interrupted(file, **kwargs):
        written.append(1)
        file.write(b"torn")
        if len(written) == 3:
            raise KeyboardInterrupt
        file.seek(0)
        original(file, **kwargs)

    monkeypatch.setattr(write, "_write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shard(photos, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert len(list((tmp_path / "out").glob("*.tar"))) == 2
    total = len(list((tmp_path / "whole").glob("*.tar")))
    assert shard(photos, tmp_path / "out") == 0
    assert len(written) == 1 + total
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert shard(photos, tmp_path / "out") == 0 and len(written) == 1 + total
    assert json.loads((tmp_path / "out" / "shards.json").read_text())["complete"]


def test_data_shard__refuses_other_images_and_other_folders(photos, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with error("data.shard_out", found=["thesis.tex"]):
        shard(photos, tmp_path / "mine")
    assert shard(photos, tmp_path / "out") == 0
    with error("data.shard_out"):
        shard(photos, tmp_path / "out", "--seed", "1")
    (photos / "train" / "cat" / "v1.0 0.jpeg").write_bytes(encoded(999))
    with error("data.shard_out"):
        shard(photos, tmp_path / "out")


def test_data_shard__splits_a_folder_of_classes(photos, tmp_path, capsys):
    assert shard(photos / "train", tmp_path / "out", "--val-share", "0.25") == 0
    train, val, _ = capsys.readouterr().out.splitlines()
    counts = [int(line.split()[1]) for line in (train, val)]
    assert sum(counts) == 16 and counts[1] >= 2


# ---- check ----


def check(*words, capsys) -> tuple[int, str]:
    capsys.readouterr()
    status = command.main(["check", *map(str, words), "--workers", "0"])
    return status, capsys.readouterr().out


def test_data_check__finds_nothing_in_good_data(photos, tmp_path, capsys):
    assert shard(photos, tmp_path / "out") == 0
    status, out = check(tmp_path / "out", capsys=capsys)
    assert status == 0 and "2 classes, 8 to 8 images each" in out and "no problems found" in out
    assert check(photos, capsys=capsys)[0] == 0


def test_data_check__lists_every_problem(photos, tmp_path, capsys):
    out = tmp_path / "out"
    assert shard(photos, out) == 0
    names = sorted(path.name for path in out.glob("train-*.tar"))
    content = bytearray((out / names[0]).read_bytes())
    at = content.index(b"\xff\xd8") if b"\xff\xd8" in content else content.index(b"\x89PNG")
    content[at : at + 40] = bytes(40)
    (out / names[0]).write_bytes(content)
    (out / names[1]).write_bytes((out / names[1]).read_bytes()[:5000])
    (out / names[2]).unlink()
    status, said = check(out, capsys=capsys)
    assert status == 1 and "4 problems found" in said
    assert f"{out / names[0]} has changed" in said and "cannot be decoded" in said
    assert f"{out / names[1]} is truncated" in said and f"{out / names[2]} is missing" in said


@pytest.mark.parametrize("failing", ["index_shard", "_decode"])
def test_data_check__continues_after_a_shard_that_cannot_be_read(tmp_path, monkeypatch, capsys, failing):
    root, function, calls = write_tars(tmp_path / "s"), getattr(checking, failing), []

    def failing_once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.EIO, "Input/output error")
        return function(*arguments)

    monkeypatch.setattr(checking, failing, failing_once)
    status, said = check(root, capsys=capsys)
    assert status == 1 and "1 problem found" in said and len(calls) == 6
    assert f"{root / 'train-00001.tar'} cannot be read: [Errno 5] Input/output error" in said


def test_data_check__reads_parquet_and_folders(photos, tmp_path, capsys):
    write_parquet(tmp_path / "hub/train-0.parquet", range(6))
    write_parquet(tmp_path / "hub/val-0.parquet", range(3))
    assert check(tmp_path / "hub", capsys=capsys)[0] == 0
    (photos / "val" / "cat" / "bad.jpg").write_bytes(b"no image")
    status, said = check(photos, capsys=capsys)
    assert status == 1 and "bad.jpg cannot be decoded (not an image format that Pillow supports)" in said


@pytest.mark.slow
def test_data_check__in_another_process(tmp_path, capsys):
    write_tars(tmp_path / "s")
    assert command.main(["check", str(tmp_path / "s"), "--workers", "1"]) == 0
    assert "train: 21 images in 4 shards" in capsys.readouterr().out
