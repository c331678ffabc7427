"""Signs of life: a process that dies is named by the others, which end soon and so can be started again together."""

import logging
import os
import socket
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from vitkernels.errors import EXIT_INTERRUPTED

log = logging.getLogger(__name__)

BEAT = 1.0  # seconds between two signs of life


class Watch:
    """A thread of each process that says "alive" in a store and looks after others.

    Those on the same host are missed as soon as their process is gone; every process when its sign of life is
    `lost_after` seconds old. Whoever misses one tells all through the store, and all end with the exit code that asks
    for a restart: a device may never come back from waiting for a peer, so nothing gentler would end them in time.

    address: of the store, (host, port). keeps_store: the store ends with this process, so that it ends a little later
    than it says why.
    """

    def __init__(self, rank: int, world: int, lost_after: float, address: tuple[str, int], keeps_store: bool = False):
        self.rank, self.world, self.lost_after = rank, world, lost_after
        self.address = address
        self._linger = 3 * BEAT if keeps_store else 0
        self._stop = threading.Event()

    def start(self) -> None:
        """Watch, and be watched."""
        if self.world == 1:
            return
        # A connection of its own: the process group's may be held by a call that waits for a peer. The keys are this
        # start's own, since torchrun's store outlives a restart.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.TCPStore(*self.address, is_master=False)
        self._store = dist.PrefixStore(f"alive/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)
        self._store.set_timeout(timedelta(seconds=self.lost_after))
        self._store.set(f"who/{self.rank}", f"{socket.gethostname()} {os.getpid()}")
        self._store.set(f"beat/{self.rank}", "0")
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No longer miss anyone, nor be missed."""
        if self.world > 1 and not self._stop.is_set():
            self._stop.set()
            self._thread.join()

    def fail(self, error: BaseException) -> None:
        """This process ends with an error of its own: tell the others, unless it comes from a peer that was lost."""
        if self.world > 1:
            self._thread.join(3 * BEAT)
            reason = (str(error).splitlines() or [""])[0]
            self._store.set("lost", f"rank {self.rank} ended with {type(error).__name__}: {reason}")
            self.stop()
            time.sleep(self._linger)

    def fail_alike(self, error: BaseException) -> None:
        """As `fail`, with an error that all should come to: if they do, each ends with it by itself."""
        if self.world > 1:
            self._store.set(f"failed/{self.rank}", "")
            deadline = time.monotonic() + 3 * BEAT
            while not self._store.check([f"failed/{rank}" for rank in range(self.world)]):
                if time.monotonic() > deadline:
                    return self.fail(error)
                time.sleep(0.05)
            self.stop()
            time.sleep(self._linger)

    def end_all(self, message: str) -> None:
        """End this process and, by the store, all others, with a message: for what no exception could end."""
        # Who is gone now may have been the first to miss another: that comes first.
        self._end(self._store.compare_set("lost", "", message).decode())

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:
            if not self._stop.is_set():
                where = "{}:{}".format(*self.address)
                self._end(f"the store at {where} is gone ({error}): its host, or the process that kept it, has ended")

    def _look(self) -> None:
        names = [name.decode().split() for name in self._store.multi_get([f"who/{r}" for r in range(self.world)])]
        beats: list[tuple[bytes, float]] = [(b"", time.monotonic())] * self.world
        others = [rank for rank in range(self.world) if rank != self.rank]
        here = [rank for rank in others if names[rank][0] == socket.gethostname()]
        count = 0
        while not self._stop.wait(BEAT):
            count += 1
            self._store.set(f"beat/{self.rank}", str(count))
            if self._store.check(["lost"]):
                self._end(self._store.get("lost").decode())
            for rank in here:
                if not _is_alive(int(names[rank][1])) and self._store.get(f"beat/{rank}") != b"left":
                    self._miss(rank, names[rank], "is gone")
            now = time.monotonic()
            for rank, beat in zip(others, self._store.multi_get([f"beat/{r}" for r in others]), strict=True):
                if beat != beats[rank][0]:
                    beats[rank] = beat, now
                elif beat != b"left" and now - beats[rank][1] > self.lost_after:
                    self._miss(rank, names[rank], f"has given no sign of life for {self.lost_after:.0f} s")
        self._store.set(f"beat/{self.rank}", "left")

    def _miss(self, rank: int, name: list[str], what: str) -> None:
        self.end_all(f"rank {rank} (process {name[1]} on {name[0]}) {what}")

    def _end(self, message: str) -> None:
        log.error("%s; rank %d ends. A restart with resume=auto goes on from the newest checkpoint", message, self.rank)
        logging.shutdown()
        time.sleep(self._linger)
        os._exit(EXIT_INTERRUPTED)


def _is_alive(process: int) -> bool:
    """Whether a process of this host runs; one that has ended and was not yet waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
