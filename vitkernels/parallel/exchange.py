"""Memory of each rank that all ranks write to, by the GPUs' copy engines, and the mean of what they wrote.

Shape suffixes: R ranks, B bytes of what one rank sends, L elements of one dtype in it.
"""

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

_ALIGNED = 128  # bytes, of which each gradient begins at a multiple
_ALL_SENT, _ALL_READ = 0, 1  # channels of barriers: one can begin while another lasts

_worlds: dict[str, int] = {}  # by the name of a process group, where torch finds ranks by it


class Exchange:
    """What all ranks send each other in one step: a row of bytes for each sender in the memory of each rank.

    sizes, dtypes: of each gradient, in elements and as it travels; those from number first_small on are float32, and
    sent together. Gradients of one dtype lie side by side, so that one pass over them takes their mean.
    received_RB: this rank's memory, of row_bytes(sizes, dtypes) for each rank: 0.35 GB for a ViT-B on 2 ranks whose
    gradients travel in bfloat16, else 0.7.
    memory: as torch's _SymmetricMemory has it: rank, world_size, get_buffer, which gives any rank's received_RB, and
    barrier(channel), which comes to pass, in the order of the current stream, when all ranks are there.
    """

    def __init__(self, sizes: list[int], dtypes: list[torch.dtype], first_small: int, received_RB: Tensor, memory):
        self.dtypes, self._memory = dtypes, memory
        on_gpu = received_RB.device.type == "cuda"
        rank, world = memory.rank, memory.world_size
        assert received_RB.shape == (world, row_bytes(sizes, dtypes))
        # Ranks begin with different receivers, so that none has all of them at once; its own row comes last.
        receivers = [(rank + step) % world for step in range(1, world + 1)]
        mine = [memory.get_buffer(receiver, received_RB.shape, torch.uint8)[rank] for receiver in receivers]
        spans = _spans(sizes, dtypes)
        self._targets = [
            [row[span].view(dtype) for row in mine]
            for span, dtype in zip(spans[:first_small], dtypes[:first_small], strict=True)
        ]
        self._small = [received_RB[rank, span].view(torch.float32) for span in spans[first_small:]]
        self._small_targets = [row[spans[first_small].start :] for row in mine] if self._small else []  # its own last
        self._received, self._places = _by_dtype(received_RB, spans, dtypes)
        self._side = torch.cuda.Stream(received_RB.device) if on_gpu else None
        self._mean = torch.compile(_mean, dynamic=False) if on_gpu else _mean  # one kernel that reads all once
        with torch.no_grad():
            self._means()  # compiled here, before ranks wait for each other

    def _means(self) -> list[Tensor]:
        return [self._mean(received_RL) for received_RL in self._received]

    @contextlib.contextmanager
    def _beside(self):
        """After all that the current stream has been given so far, and beside what it is given next."""
        if self._side is None:
            yield
        else:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                yield

    def send(self, gradients: list[tuple[int, Tensor]]) -> None:
        """To all ranks, by index. Their memory must stay as it is until `averages` returns."""
        with self._beside():
            for index, gradient in gradients:
                for target in self._targets[index]:
                    target.copy_(gradient.view(-1), non_blocking=True)

    def send_small(self, gradients: list[Tensor]) -> None:
        """To all ranks, all of them from number first_small on."""
        if not gradients:
            return
        with self._beside():
            torch._foreach_copy_(self._small, [gradient.view(-1) for gradient in gradients])
            *others, own = self._small_targets
            for target in others:
                target.copy_(own, non_blocking=True)

    def wait(self) -> None:
        """Have the current stream wait until all that was sent has left."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def averages(self) -> list[Tensor]:
        """Of all gradients, flat, by index, once all ranks have sent them. All ranks must call it, once a step."""
        self.wait()
        self._memory.barrier(_ALL_SENT)
        means = self._means()
        with self._beside():  # what the next step sends waits here for the slowest reader, and nothing else does
            self._memory.barrier(_ALL_READ)
        return [means[region][span] for region, span in self._places]

    def close(self) -> None:
        """Wait until no rank writes to another's memory any more. All ranks must call it."""
        self.wait()
        self._memory.barrier(_ALL_SENT)
        if self._side is not None:
            torch.cuda.synchronize(self._side.device)


def row_bytes(sizes: list[int], dtypes: list[torch.dtype]) -> int:
    """Of what one rank sends, as an Exchange has it."""
    return sum(map(_padded, sizes, dtypes))


def _padded(size: int, dtype: torch.dtype) -> int:
    return -(-size * dtype.itemsize // _ALIGNED) * _ALIGNED


def _spans(sizes: list[int], dtypes: list[torch.dtype]) -> list[slice]:
    """The bytes of each gradient in a row, by index: those of float32 come last, and so the small ones at the end."""
    spans, begin = [slice(0)] * len(sizes), 0
    for index in sorted(range(len(sizes)), key=lambda index: (dtypes[index] == torch.float32, str(dtypes[index]))):
        spans[index] = slice(begin, begin + sizes[index] * dtypes[index].itemsize)
        begin += _padded(sizes[index], dtypes[index])
    return spans


def _by_dtype(received_RB: Tensor, spans: list[slice], dtypes: list[torch.dtype]):
    """received_RL of each dtype there is, and for each gradient by index (which of them, the elements in it)."""
    received, places = [], [None] * len(spans)
    for region, dtype in enumerate(dict.fromkeys(dtypes)):
        own = [(index, span) for index, (span, other) in enumerate(zip(spans, dtypes, strict=True)) if other == dtype]
        begin, end = min(span.start for _, span in own), max(span.stop for _, span in own)
        received.append(received_RB[:, begin:end].view(dtype))
        for index, span in own:
            places[index] = region, slice((span.start - begin) // dtype.itemsize, (span.stop - begin) // dtype.itemsize)
    return received, places


def _mean(received_RL: Tensor) -> Tensor:
    rows = received_RL.unbind()
    total_L = rows[0].float()
    for row_L in rows[1:]:
        total_L = total_L + row_L.float()
    return total_L / len(rows)


def gpu_memory(length: int, device: torch.device) -> tuple[Tensor, _SymmetricMemory]:
    """An Exchange's received_RB, with rows of `length` bytes, and memory, for the ranks of the default process group.

    All of them must call it.
    """
    group, world = dist.group.WORLD.group_name, dist.get_world_size()
    if torch.__version__ < "2.11":  # which finds ranks and store by the group's name, for as long as the process lives
        if _worlds.setdefault(group, world) != world:
            raise RuntimeError(f"this process was one of {_worlds[group]} before, which torch < 2.11 does not forget")
        enable_symm_mem_for_group(group)
    torch.cuda.empty_cache()  # PyTorch's allocator gives nothing of its own back when this one finds no memory
    # Not from symm_mem.empty, whose pool would keep this for good, and give it to an engine with other ranks.
    shape = (world, length)
    received_RB = _SymmetricMemory.empty_strided_p2p(shape, (length, 1), torch.uint8, device)
    return received_RB, _SymmetricMemory.rendezvous(received_RB, group)


def unavailable(device: torch.device) -> str | None:
    """Why the ranks cannot write to each other's memory, seen by trying; None if they can. All ranks must call it."""
    try:
        gpu_memory(_ALIGNED, device)
    except RuntimeError as error:  # in a container, for one, that may not pass on file descriptors
        return f"torch's symmetric memory fails here: {str(error).splitlines()[0]}"
    return None
