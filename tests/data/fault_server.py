"""An HTTP server of a folder that stalls, cuts, lies and fails on request."""

import os
import socket
import struct
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FaultServer:
    """Serves the files of a folder, with their list; faults[name] are the faults of the next requests of a file.

    Faults: "stall" (half of the file, then silence), "cut" (half of it), "lie" (as many other bytes), "long" (more
    bytes than the file has), "reset" (of the connection), "500", "404". A folder has resets only. requests: counts
    GETs by name. down: refuse everything.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.requests: Counter[str] = Counter()
        self.down = False
        self.over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, faulty: FaultServer, *args):
        self.faulty = faulty
        super().__init__(*args, directory=str(faulty.folder))

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.faulty.requests[name] += 1
        faults = self.faulty.faults[name]
        if self.faulty.down:
            self.send_error(503)
        elif not faults:
            super().do_GET()
        else:
            self._fail(faults.pop(0), self.faulty.folder / name)

    def do_HEAD(self) -> None:
        if self.faulty.down:
            self.send_error(503)
        else:
            super().do_HEAD()

    def _fail(self, fault: str, file: Path) -> None:
        if fault.isdigit():
            self.send_error(int(fault))
            return
        if fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by RST
            os.close(self.connection.detach())  # before the server shuts the connection down in order
            self.close_connection = True
            return
        content = file.read_bytes()
        content += b"more" if fault == "long" else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault in ("stall", "cut"):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            if fault == "stall":
                self.faulty.over.wait(60)
            self.close_connection = True
        else:
            with suppress(BrokenPipeError):
                self.wfile.write(bytes(len(content)) if fault == "lie" else content)

    def log_message(self, *args) -> None:
        pass
