"""data=shards from hf:// URLs: huggingface_hub's own client against a server with four of the hub's endpoints."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from finished_batches import finished_epoch
from shard_fixtures import build, write_tars

pytest.importorskip("huggingface_hub")

REPO = "datasets/somebody/photos"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


class Hub(BaseHTTPRequestHandler):
    """A dataset repository: its revision, the tree of its files, the sizes of named files, and their contents."""

    protocol_version = "HTTP/1.1"
    folder: Path
    seen: set[str]  # paths of requests, shared by all

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.seen.add(path)
        if path == f"api/{REPO}" or path == f"api/{REPO}/revision/main":
            self._answer({"id": REPO.partition("/")[2], "sha": COMMIT, "siblings": []})
        elif path.startswith(f"api/{REPO}/tree/main"):
            self._answer([self._entry(file) for file in sorted(self.folder.iterdir())])
        elif path.startswith(f"{REPO}/resolve/main/"):
            self._send_file(self.folder / path.rpartition("/")[2])
        else:
            self._answer({"error": f"no such page: {path}"}, 404)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        names = [file.name for file in self.folder.iterdir() if file.name in body]
        self._answer([self._entry(self.folder / name) for name in names])

    def _entry(self, file: Path) -> dict:
        return {"type": "file", "oid": f"{hash(file.name):040x}"[-40:], "size": file.stat().st_size, "path": file.name}

    def _answer(self, content: dict | list, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, file: Path) -> None:
        if not file.exists():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content, given, status = file.read_bytes(), self.headers.get("Range"), 200
        headers = {"ETag": f'"{file.name}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if given:
            first, _, last = given.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            content, status = content[begin : end + 1], 206
        self._send(status, content, headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path):
    write_tars(tmp_path / "served")
    handler = type("OfFolder", (Hub,), {"folder": tmp_path / "served", "seen": set()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    assert f"{REPO}/resolve/main/train-00000.tar" in handler.seen
    assert any(path.startswith(f"api/{REPO}/tree/main") for path in handler.seen)
    server.shutdown()
    server.server_close()


_TRAIN = f"""
import sys, torch
sys.path[:0] = {[str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "data")]!r}
from finished_batches import finished_epoch
from shard_fixtures import build
torch.save(list(finished_epoch(build("hf://{REPO}", window=8).train, 1)), sys.argv[1])
"""


def test_shards__on_the_hub_equal_the_local_folder(endpoint, tmp_path, same):
    """In a process of its own, since huggingface_hub reads HF_ENDPOINT when it is imported."""
    import torch

    home = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", _TRAIN, str(tmp_path / "batches.pt")]
    done = subprocess.run(command, env={**os.environ, **home}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    local = build(tmp_path / "served", window=8)
    assert same(torch.load(tmp_path / "batches.pt"), list(finished_epoch(local.train, 1)))
