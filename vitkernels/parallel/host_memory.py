"""Host memory shared by the processes of one host, read and written by their GPUs in stream order.

GPUs also signal each other through it, by the CUDA driver's stream memory operations
(https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEMOP.html), so neither host threads nor kernels wait.
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


class SharedHostRows:
    """One row of `length` bytes and `flags` int32 flags per rank: a rank writes its own row, all ranks read all rows.

    rows: uint8 tensors of `length` bytes by rank, pinned for GPUs. Flags start at 0.
    On GPUs `signal` and `wait` are ordered in the current stream, as copies are; on CPUs they run at once.
    gather: returns every rank's value, by rank. All ranks must construct their SharedHostRows together.
    Raises OSError or RuntimeError if the memory cannot be allocated, possibly on some ranks only.
    """

    def __init__(self, length: int, flags: int, rank: int, device: torch.device, gather: Callable[[object], list]):
        self.rank, self.device = rank, device
        flags_begin = -(-length // _PAGE) * _PAGE
        size = flags_begin + 4 * flags
        memory = [torch.frombuffer(mapping, dtype=torch.uint8) for mapping in _map_all_ranks(size, gather)]
        if device.type == "cuda":
            pinned: list[Tensor] = []
            weakref.finalize(self, _unpin, pinned, device).atexit = False
            for one in memory:
                _pin(one, device)
                pinned.append(one)
        self.rows = [one[:length] for one in memory]
        self._flags = [one[flags_begin:].view(torch.int32) for one in memory]
        self._addresses = [flags_of_one.data_ptr() for flags_of_one in self._flags]

    def signal(self, flag: int, value: int) -> None:
        """Set one of this rank's flags, after earlier copies to its row are visible to the other ranks."""
        if self.device.type == "cuda":
            _stream_operation("cuStreamWriteValue32_v2", self.device, self._addresses[self.rank] + 4 * flag, value, 0)
        else:
            self._flags[self.rank][flag] = value

    def wait(self, rank: int, flag: int, value: int) -> None:
        """Wait until a rank has set its flag to `value` or more."""
        if self.device.type == "cuda":
            address = self._addresses[rank] + 4 * flag
            _stream_operation("cuStreamWaitValue32_v2", self.device, address, value, _AT_LEAST)
        else:
            while self._flags[rank][flag] < value:
                time.sleep(1e-4)


def unavailable(rank: int, device: torch.device, gather: Callable[[object], list]) -> str | None:
    """Try to share host memory; return why this rank cannot, or None if it can. All ranks must call this."""
    try:
        host = SharedHostRows(1, 1, rank, device, gather)
        host.signal(0, 1)
        host.wait(rank, 0, 1)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (OSError, RuntimeError) as error:
        return f"sharing memory between this host's processes failed: {str(error).splitlines()[0]}"
    return None


def _map_all_ranks(size: int, gather: Callable[[object], list]) -> list[mmap.mmap]:
    """Map `size` bytes of each rank into this process; return the mappings by rank."""
    own, path, error = None, None, None
    try:
        # Unnamed, so nothing is left behind, and not in /dev/shm, which is small in containers.
        own = os.memfd_create("vitkernels")
        os.posix_fallocate(own, 0, size)
        path = f"/proc/{os.getpid()}/fd/{own}"
    except OSError as raised:
        error = str(raised)
    paths, errors = zip(*gather((path, error)), strict=True)
    try:
        if any(errors):
            raise OSError(next(filter(None, errors)))
        return [_map(path, size) for path in paths]
    finally:
        gather(None)  # every rank has opened every file
        if own is not None:
            os.close(own)


def _map(path: str, size: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)


def _pin(memory: Tensor, device: torch.device) -> None:
    """Register memory with CUDA as page-locked. RuntimeError if CUDA refuses."""
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    except RuntimeError:
        # CUDA reports the error again at the next kernel launch; launch one here to clear it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        raise


def _unpin(pinned: list[Tensor], device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # no copy from or to it is pending
        for one in pinned:
            torch.cuda.cudart().cudaHostUnregister(one.data_ptr())


def _stream_operation(name: str, device: torch.device, address: int, value: int, flags: int) -> None:
    """Enqueue a write or wait of one int32 flag in the current stream."""
    stream = torch._C._cuda_getCurrentRawStream(device.index)  # skips torch.cuda.current_stream's Python
    if error := getattr(_driver(), name)(stream, address, value, flags):
        raise RuntimeError(f"the CUDA driver's {name} failed with error {error}")


@cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for operation in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
        operation.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
    return driver
