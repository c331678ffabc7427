"""Heartbeats between processes: survivors name a lost process and exit soon, so a launcher can restart all of them."""

import logging
import os
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vitkernels.errors import EXIT_INTERRUPTED

log = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between two heartbeats


class Heartbeat:
    """A thread in each process that sends heartbeats through a store and monitors the other processes.

    A process on the same host counts as lost as soon as it is gone; any process, once its last heartbeat is
    `lost_after` seconds old. The first to notice reports it to all others through the store, and all exit with the code
    that requests a restart. They exit immediately, because a device may wait for a lost peer forever.

    address: (host, port) of the store.
    keeps_store: the store ends with this process, which therefore exits a little after it has reported an error.
    """

    def __init__(self, rank: int, world: int, lost_after: float, address: tuple[str, int], keeps_store: bool = False):
        self.rank, self.world, self.lost_after = rank, world, lost_after
        self.address = address
        self._linger = 3 * INTERVAL if keeps_store else 0
        self._stop = threading.Event()

    def start(self) -> None:
        """Start sending heartbeats and monitoring the others."""
        if self.world == 1:
            return
        # A separate connection: a call that waits for a peer may hold the process group's. The keys name the attempt,
        # since torchrun's store outlives a restart.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.TCPStore(*self.address, is_master=False)
        self._store: Any = dist.PrefixStore(f"alive/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)
        self._store.set_timeout(timedelta(seconds=self.lost_after))
        self._store.set(f"who/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self._store.set(f"beat/{self.rank}", "0")
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop monitoring, and report to the others that this process left on purpose."""
        if self.world > 1 and not self._stop.is_set():
            self._stop.set()
            self._thread.join()

    def fail(self, error: BaseException) -> None:
        """Report an error of this process to the others, unless a lost peer caused it."""
        if self.world > 1:
            self._thread.join(3 * INTERVAL)
            reason = (str(error).splitlines() or [""])[0]
            self._store.set("lost", f"rank {self.rank} failed with {type(error).__name__}: {reason}")
            self.stop()
            time.sleep(self._linger)

    def fail_together(self, error: BaseException) -> None:
        """Wait until all processes have raised an error that all are expected to raise; else report it as `fail` does.

        If all raise it, each exits with its own error instead of being aborted.
        """
        if self.world > 1:
            self._store.set(f"failed/{self.rank}", "")
            deadline = time.monotonic() + 3 * INTERVAL
            while not self._store.check([f"failed/{rank}" for rank in range(self.world)]):
                if time.monotonic() > deadline:
                    return self.fail(error)
                time.sleep(0.05)
            self.stop()
            time.sleep(self._linger)

    def abort_all(self, message: str) -> None:
        """End this process and, through the store, all others: for a hang that no exception could end."""
        # A process that has exited may itself have reported another one earlier: the first report is the cause.
        self._abort(self._store.compare_set("lost", "", message).decode())

    def _run(self) -> None:
        try:
            self._monitor()
        except Exception as error:
            if not self._stop.is_set():
                where = "{}:{}".format(*self.address)
                self._abort(f"lost the connection to the store at {where} ({error}): its host or process has ended")

    def _monitor(self) -> None:
        names = [name.decode().split() for name in self._store.multi_get([f"who/{r}" for r in range(self.world)])]
        beats: list[tuple[bytes, float]] = [(b"", time.monotonic())] * self.world
        others = [rank for rank in range(self.world) if rank != self.rank]
        same_host = [rank for rank in others if names[rank][0] == socket.gethostname()]
        count = 0
        while not self._stop.wait(INTERVAL):
            count += 1
            self._store.set(f"beat/{self.rank}", str(count))
            if self._store.check(["lost"]):
                self._abort(self._store.get("lost").decode())
            for rank in same_host:
                if not _is_alive(int(names[rank][1])) and self._store.get(f"beat/{rank}") != b"left":
                    self._report_lost(rank, names[rank], "died")
            now = time.monotonic()
            for rank, beat in zip(others, self._store.multi_get([f"beat/{r}" for r in others]), strict=True):
                if beat != beats[rank][0]:
                    beats[rank] = beat, now
                elif beat != b"left" and now - beats[rank][1] > self.lost_after:
                    self._report_lost(rank, names[rank], f"sent no heartbeat for {self.lost_after:.0f} s")
        self._store.set(f"beat/{self.rank}", "left")

    def _report_lost(self, rank: int, name: list[str], what: str) -> None:
        self.abort_all(f"rank {rank} (process {name[1]} on {name[0]}) {what}")

    def _abort(self, message: str) -> None:
        log.error("%s; aborting rank %d. Restart to resume from the newest checkpoint", message, self.rank)
        logging.shutdown()
        time.sleep(self._linger)
        os._exit(EXIT_INTERRUPTED)


def _is_alive(process: int) -> bool:
    """Return whether a process of this host runs; a zombie does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # reaped before, or between opening and reading
        return False
