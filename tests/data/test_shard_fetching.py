"""data=shards from URLs: retries, checksums, the bounded cache, and clear errors."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from expecting import error
from fault_server import FaultServer
from finished_batches import finished_epoch
from shard_fixtures import build, samples, write_parquet, write_tar, write_tars

from vitkernels.data import SourceError
from vitkernels.data.folder import scan_splits
from vitkernels.data.shard_files import fetch as fetching
from vitkernels.data.shard_files.fetch import Patience, fetch, fetch_if_there, patiently
from vitkernels.data.shard_files.listing import remote_files
from vitkernels.data.shard_files.write import write_shards

pytest.importorskip("aiohttp")

QUICK = Patience(total=5, stall=0.3, first_wait=0.02)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server(tmp_path):
    (tmp_path / "served").mkdir()
    server = FaultServer(tmp_path / "served")
    yield server
    server.close()


@pytest.fixture
def file(server):
    (server.folder / "a.tar").write_bytes(bytes(range(256)) * 1000)
    return server.folder / "a.tar"


def fetched(server, tmp_path: Path, patience=QUICK, **stated) -> bytes:
    fetch(f"{server.url}/a.tar", tmp_path / "a", patience, **stated)
    return (tmp_path / "a").read_bytes()


# ---- one file ----


@pytest.mark.parametrize("faults", [["stall"], ["cut"], ["lie", "lie"], ["long"], ["500", "cut", "500"]], ids="-".join)
def test_fetch__survives_faults(server, file, tmp_path, faults):
    server.faults["a.tar"] = list(faults)
    sha256 = fetch(f"{server.url}/a.tar", tmp_path / "b", QUICK)
    server.faults["a.tar"] = list(faults)
    assert fetched(server, tmp_path, size=file.stat().st_size, sha256=_sha(file)) == file.read_bytes()
    assert server.requests["a.tar"] >= len(faults) + 2
    assert sha256 == _sha(file) or faults[0] in (
        "lie",
        "long",
    )  # without an expected size or checksum, nothing can be wrong
    assert not list(tmp_path.glob("*.tmp"))


def _sha(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("stated", [{"size": 256_001}, {"sha256": "0" * 64}], ids=str)
def test_fetch__fails_after_repeated_wrong_contents(server, file, tmp_path, stated):
    with ended("data.shard_changed", path=f"{server.url}/a.tar"):
        fetched(server, tmp_path, **stated)
    assert server.requests["a.tar"] == fetching.WRONG_CONTENTS
    assert not list(tmp_path.glob("a*"))


@pytest.mark.parametrize("faults, requests", [(["404"], 1), (["500"] * 99, None), (["stall"] * 99, None)])
def test_fetch__fails_if_errors_persist(server, file, tmp_path, faults, requests):
    server.faults["a.tar"] = faults
    begin = time.monotonic()
    with ended("data.fetch", url=f"{server.url}/a.tar"):
        fetched(server, tmp_path, Patience(total=0.4, stall=0.2, first_wait=0.05))
    assert time.monotonic() - begin < 4  # of at most 0.4 + 0.2 + the polls
    assert requests is None or server.requests["a.tar"] == requests
    assert not list(tmp_path.glob("a*"))


def test_fetch__aborted_transfer_leaves_no_file_that_it_creates_late(tmp_path, monkeypatch):
    go_on, threads = threading.Event(), []

    class SlowToConnect:
        def get_file(self, remote, local):
            threads.append(threading.current_thread())
            go_on.wait(10)
            Path(local).write_bytes(b"late")

    monkeypatch.setattr(fetching, "filesystem", lambda url: (SlowToConnect(), url))
    with ended("data.fetch"):
        fetch("slow://a", tmp_path / "a", Patience(total=0, stall=0.05))
    go_on.set()
    threads[0].join(10)
    assert not threads[0].is_alive() and not list(tmp_path.iterdir())


def test_fetch__fails_without_a_server(server, file, tmp_path):
    server.close()
    with ended("data.fetch"):
        fetched(server, tmp_path, Patience(total=0.2, stall=1, first_wait=0.05))


def ended(code: str, **fields):
    from contextlib import contextmanager

    @contextmanager
    def expected():
        with pytest.raises(SourceError) as caught:
            yield
        assert caught.value.code == code, caught.value
        assert fields.items() <= caught.value.fields.items()

    return expected()


@pytest.mark.parametrize("root, code", [("s4://x", "data.root"), ("gs://x", "data.package")])
def test_root__of_an_unsupported_protocol_is_refused(root, code):
    if code == "data.package":
        try:
            import gcsfs  # noqa: F401

            pytest.skip("gcsfs is installed")
        except ImportError:
            pass
    with error(code):
        build(root)


class Refused(Exception):
    """An error like those of gcsfs and huggingface_hub."""

    def __init__(self, status: int):
        super().__init__(f"status {status}")
        self.code = status


class NoCredentialsError(Exception):
    """An error like those of botocore."""


FINAL = [FileNotFoundError("no bucket"), PermissionError("denied"), Refused(404), Refused(403), NoCredentialsError()]
FINAL += [ValueError("invalid bucket name"), type("ParamValidationError", (Exception,), {})()]
TRANSIENT = [ConnectionResetError(), TimeoutError(), OSError("broken pipe"), Refused(503), Refused(429), Refused(408)]


@pytest.mark.parametrize("failure", FINAL, ids=repr)
def test_listing__permanent_failure_is_reported_at_once(failure):
    calls = []

    def action():
        calls.append(1)
        raise failure

    with error("data.root", root="s3://x"):
        patiently("listing s3://x", "s3://x", action, Patience(total=60, first_wait=30))
    assert len(calls) == 1


@pytest.mark.parametrize("failure", TRANSIENT, ids=repr)
def test_listing__is_retried_after_a_network_failure(failure):
    outcomes = [failure, failure, None]

    def action():
        if outcome := outcomes.pop(0):
            raise outcome
        return "listed"

    assert patiently("listing s3://x", "s3://x", action, Patience(total=5, first_wait=0.01)) == "listed"


@pytest.mark.parametrize("folder", ["", "more"])
def test_listing__connection_that_breaks_is_retried_and_then_an_error(server, folder):
    """fsspec's own `find` took the folder for an empty one."""
    write_tars(server.folder)
    (server.folder / "more").mkdir()
    (server.folder / "train-00003.tar").rename(server.folder / "more" / "train-00004.tar")
    patterns = {"train": "**"}
    server.faults[folder] = ["reset", "reset"]
    found = remote_files(server.url, patterns, QUICK)
    names = [file.name for file in found if "train" in file.name]
    assert names == ["more/train-00004.tar", *(f"train-{n:05d}.tar" for n in range(3))]
    server.faults[folder] = ["reset"] * 99
    with ended("data.fetch"):
        remote_files(server.url, patterns, Patience(total=0.3, first_wait=0.02))


def test_listing__server_that_is_gone_is_an_error(server):
    url = server.url
    server.close()
    with ended("data.fetch"):
        remote_files(url, {"train": "*.tar"}, Patience(total=0.2, first_wait=0.02))


def test_shards__missing_name_is_refused_at_once(server):
    write_tars(server.folder)
    begin = time.monotonic()
    with error("data.root", root=f"{server.url}/train-00009.tar"):
        build(server.url, train_shards="train-00009.tar", val_shards="val-00000.tar")
    assert time.monotonic() - begin < 5  # of 600 s of patience


def test_shards__size_request_is_retried(server):
    write_tars(server.folder)
    threading.Timer(0.5, lambda: setattr(server, "down", False)).start()
    server.down = True
    found = remote_files(server.url, {"train": "train-{00000..00003}.tar"}, Patience(total=20, first_wait=0.1))
    assert [file.name for file in found] == [f"train-{n:05d}.tar" for n in range(4)] and all(f.size for f in found)


@pytest.mark.parametrize("status", ["403", "404"])
def test_shards__index_hidden_by_a_bucket_counts_as_absent(server, tmp_path, status):
    server.faults["index"] = [status]
    (server.folder / "index").touch()
    assert not fetch_if_there(f"{server.url}/index", tmp_path / "index", QUICK)
    assert server.requests["index"] == 1


# ---- as a data set ----


def test_shards__patterns_of_brackets_are_expanded(server):
    write_tars(server.folder)
    data = build(server.url, train_shards="train-0000[0-2].tar", val_shards="val-0000[01].tar")
    assert (data.train.num_samples, data.val.num_samples) == (18, 9)


def test_shards__on_an_fsspec_memory_filesystem(tmp_path, same):
    """memory:// stands in for s3://, gs:// and hf://: a listing with sizes, and no HTTP."""
    import fsspec

    write_tars(tmp_path / "local")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "local"), "/bucket/photos", recursive=True)
    try:
        data, local = build("memory://bucket/photos", window=8), build(tmp_path / "local", window=8)
        assert same(finished_epoch(data.train, 1), finished_epoch(local.train, 1))
        with error("data.root", root="memory://bucket/photo"):
            build("memory://bucket/photo")
    finally:
        memory.store.clear()


def test_shards__unusable_cache_stops_training_but_not_the_prefetch_thread(server, tmp_path):
    write_tars(server.folder)
    data = build(server.url, window=6, check_images=0)
    source = data.train._batches.samples.source
    source.order(np.random.default_rng(0))
    folder = tmp_path / "cache/vitkernels/shards/fetched"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("a file instead of the folder")
    with ended("data.cache", folder=str(folder)):
        source.read(0)
    assert source.store._thread.is_alive()
    folder.unlink()
    order = source.order(np.random.default_rng(1))  # the thread tries again with a new order
    source.read(int(order[0]))
    deadline = time.monotonic() + 10
    while len(list(folder.glob("*.tar"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert source.store._thread.is_alive() and len(list(folder.glob("*.tar"))) >= 2


def test_shards__at_a_url_equal_the_local_folder(server, tmp_path, same):
    write_tars(server.folder)
    data, local = build(server.url, window=8), build(server.folder, window=8)
    assert same(finished_epoch(data.train, 1), finished_epoch(local.train, 1))
    assert same(finished_epoch(data.val, 0), finished_epoch(local.val, 0))
    asked = server.requests.copy()
    assert all(asked[f"train-{n:05d}.tar"] == 1 for n in range(4))
    again = build(server.url, window=8)
    assert same(finished_epoch(again.train, 1), finished_epoch(local.train, 1))
    assert all(server.requests[name] == asked[name] for name in asked if name.endswith(".tar"))
    assert again.val.describe([0]) == [f"{server.url}/val-00000.tar: 000021"]


def test_shards__ranges_need_no_listing(server):
    write_tars(server.folder)
    server.faults[""] = ["500"] * 9
    data = build(server.url, train_shards="train-{00000..00003}.tar", val_shards="val-00000.tar")
    assert (data.train.num_samples, data.val.num_samples) == (21, 6)


def test_shards__of_parquet_files_at_a_url(server):
    write_parquet(server.folder / "train-0.parquet", range(5))
    write_parquet(server.folder / "val-0.parquet", range(3))
    data = build(server.url)
    assert data.class_names == ["a", "b", "c"] and data.train.num_samples == 5


def test_shards__with_a_published_index_need_no_pass_over_the_data(server, make_root, same):
    root = make_root(train=8, val=3)
    write_shards(scan_splits(str(root), ["train", "val"]), server.folder, shard_bytes=10_000, seed=0)
    data = build(server.url, window=6)
    assert data.class_names == ["a", "b", "c"] and data.train.num_samples == 24
    asked = [name for name, count in server.requests.items() if name.endswith(".tar")]
    assert asked == ["train-00000.tar", "val-00000.tar"]  # the headers that are checked
    local = build(server.folder, window=6)
    assert same(finished_epoch(data.train, 0), finished_epoch(local.train, 0))
    (server.folder / "train-00000.tar").write_bytes(bytes((server.folder / "train-00000.tar").stat().st_size))
    fresh = build(server.url, window=6, cache=str(server.folder.parent / "other"), check_images=0)
    with ended("data.shard_changed", path=f"{server.url}/train-00000.tar"):
        list(fresh.train.epoch(0))


def size_if_there(path) -> int:
    """Return the size of a file; 0 if the prefetch thread has evicted it meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def test_shards__cache_stays_bounded_and_holds_the_next_window(server, tmp_path, same):
    write_tars(server.folder, train=120, val=6)  # 20 shards of 6 images
    size = (server.folder / "train-00000.tar").stat().st_size
    limit = 16 * size
    data = build(server.url, window=12, cache_gb=limit / 1e9, check_images=0)
    local = build(server.folder, window=12)
    folder = tmp_path / "cache/vitkernels/shards/fetched"
    largest = 0
    for batch, other in zip(finished_epoch(data.train, 1), finished_epoch(local.train, 1), strict=True):
        assert same([batch], [other])
        largest = max(largest, sum(map(size_if_there, folder.glob("*.tar"))))
    assert 8 * size < largest <= limit
    with error("data.cache_gb", needed_gb=pytest.approx(21 * size / 1e9, rel=0.1)):
        build(server.url, cache_gb=limit / 1e9)


def test_shards__are_prefetched_while_earlier_ones_are_read(server):
    write_tars(server.folder, train=24, val=6)
    build(server.url, check_images=0)  # indexed
    data = build(server.url, window=6, check_images=0, cache=str(server.folder.parent / "other"))
    for path in (server.folder.parent / "other/fetched").glob("*.tar"):
        path.unlink()
    server.requests.clear()
    batches = data.train.epoch(0)
    next(batches)
    deadline = time.monotonic() + 10
    while sum(server.requests.values()) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sum(server.requests.values()) >= 3  # one batch reads at most two
    batches.close()


def test_shards__two_readers_fetch_a_shard_once(server, tmp_path):
    from vitkernels.data.shard_files.contract import ShardFile
    from vitkernels.data.shard_files.store import ShardCache

    path = write_tar(server.folder / "a.tar", samples(range(2)))
    shard = ShardFile("a.tar", f"{server.url}/a.tar", path.stat().st_size)
    caches = [ShardCache(tmp_path / "c", 10**9, QUICK) for _ in range(4)]
    server.faults["a.tar"] = ["cut"]
    threads = [threading.Thread(target=cache.fetched, args=(shard,)) for cache in caches]
    [thread.start() for thread in threads]
    [thread.join(10) for thread in threads]
    assert server.requests["a.tar"] == 2
    assert caches[0].path(shard).read_bytes() == path.read_bytes()


def test_shards__truncated_shard_at_a_url_is_named(server):
    write_tars(server.folder)
    path = server.folder / "train-00002.tar"
    path.write_bytes(path.read_bytes()[:3000])
    with error("data.shard_truncated", path=f"{server.url}/train-00002.tar"):
        build(server.url)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_shards__training_stops_if_the_network_stays_down(server, tmp_path, workers):
    write_tars(server.folder)
    data = build(server.url, window=6, patience=0.1, num_workers=workers, check_images=0)
    for path in (tmp_path / "cache/vitkernels/shards/fetched").glob("*.tar"):
        path.unlink()
    server.down = True
    with ended("data.fetch"):
        list(data.train.epoch(0))
