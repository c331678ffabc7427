"""Host memory that the processes of one host share, and that their GPUs read and write in stream order.

GPUs signal each other through it as well, by the stream memory operations of the CUDA driver API
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEMOP.html): no host waits for another, and no kernel does.
"""

import contextlib
import ctypes
import mmap
import os
import time
import weakref
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

_PAGE = mmap.PAGESIZE
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ


class HostRows:
    """For each rank a row of `length` bytes and `flags` numbers, 0 at first; it writes its own, and all ranks read all.

    rows: uint8, by rank; for GPUs they are pinned.
    On GPUs `announce` and `expect` take their turn in the current stream, as copies do; on CPUs they happen at once.
    gather: gives every rank's value, by rank. All ranks must make their HostRows at the same time.
    Raises OSError or RuntimeError where there is no such memory, maybe on some ranks only.
    """

    def __init__(self, length: int, flags: int, rank: int, device: torch.device, gather: Callable[[object], list]):
        self.rank, self.device = rank, device
        flags_begin = -(-length // _PAGE) * _PAGE
        size = flags_begin + 4 * flags
        memory = [torch.frombuffer(mapping, dtype=torch.uint8) for mapping in _mapped_by_all(size, gather)]
        if device.type == "cuda":
            pinned: list[Tensor] = []
            weakref.finalize(self, _unpin, pinned, device).atexit = False
            for one in memory:
                _pin(one, device)
                pinned.append(one)
        self.rows = [one[:length] for one in memory]
        self._flags = [one[flags_begin:].view(torch.int32) for one in memory]
        self._addresses = [flags_of_one.data_ptr() for flags_of_one in self._flags]

    def announce(self, flag: int, value: int) -> None:
        """Set one of this rank's flags, once what was copied to its row before is there for the others to read."""
        if self.device.type == "cuda":
            _stream_operation("cuStreamWriteValue32_v2", self.device, self._addresses[self.rank] + 4 * flag, value, 0)
        else:
            self._flags[self.rank][flag] = value

    def expect(self, rank: int, flag: int, value: int) -> None:
        """Wait until a rank has announced this value or a greater one."""
        if self.device.type == "cuda":
            address = self._addresses[rank] + 4 * flag
            _stream_operation("cuStreamWaitValue32_v2", self.device, address, value, _AT_LEAST)
        else:
            while self._flags[rank][flag] < value:
                time.sleep(1e-4)


def unavailable(rank: int, device: torch.device, gather: Callable[[object], list]) -> str | None:
    """Why this rank cannot have HostRows, seen by trying; None if it can. All ranks must call it."""
    try:
        host = HostRows(1, 1, rank, device, gather)
        host.announce(0, 1)
        host.expect(rank, 0, 1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (OSError, RuntimeError) as error:
        return f"memory shared by the processes of this host fails: {str(error).splitlines()[0]}"
    return None


def _mapped_by_all(size: int, gather: Callable[[object], list]) -> list[mmap.mmap]:
    """`size` bytes of each rank, by rank, in the address space of this one."""
    own, path, error = None, None, None
    try:
        # Without a name, so that nothing is left behind, and not in /dev/shm, of which containers have little.
        own = os.memfd_create("vitkernels")
        os.posix_fallocate(own, 0, size)
        path = f"/proc/{os.getpid()}/fd/{own}"
    except OSError as raised:
        error = str(raised)
    paths, errors = zip(*gather((path, error)), strict=True)
    try:
        if any(errors):
            raise OSError(next(filter(None, errors)))
        return [_mapped(path, size) for path in paths]
    finally:
        gather(None)  # each has opened all
        if own is not None:
            os.close(own)


def _mapped(path: str, size: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _pin(memory: Tensor, device: torch.device) -> None:
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    except RuntimeError:
        # CUDA remembers it, and whoever launches the next kernel would be told: that is the one here.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise


def _unpin(pinned: list[Tensor], device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # nothing is copied from or to it any more
        for one in pinned:
            torch.cuda.cudart().cudaHostUnregister(one.data_ptr())


def _stream_operation(name: str, device: torch.device, address: int, value: int, flags: int) -> None:
    stream = torch._C._cuda_getCurrentRawStream(device.index)  # of torch.cuda.current_stream, but for its Python
    if error := getattr(_driver(), name)(stream, address, value, flags):
        raise RuntimeError(f"{name} of the CUDA driver ends with error {error}")


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for operation in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
        operation.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return driver
