"""Gradients of all ranks of one host, through its memory, by the GPUs' copy engines, and their mean.

Gradients that travel together are first put side by side, by a short kernel: that spares the host calls for each.
Not over NVLink: links that carry next to nothing, but do not sleep, took 2.4 % of the speed of two H200s at their power
limit (notes/parallel.md).

Shape suffixes: R ranks, B bytes of what one rank sends, L elements of one dtype in it.
"""

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from vitkernels.parallel.host_memory import HostRows

_ALIGNED = 128  # bytes, of which each gradient begins at a multiple
_LEAST = 2**20  # elements that travel together; for fewer the host's calls take longer than the transfer
_OF_THE_REST = 8  # a group is that part of what is still to come: large at first, and soon there at the end


class Exchange:
    """What the ranks send each other in one step, and have of each other then: a row of bytes for each of them.

    shapes, dtypes: of each gradient, as it travels.
    groups: which of them travel together, as `grouped` has them; the same on all ranks. They are received in this
    order, and each once all up to it are sent. So ranks never wait in a circle, though they may send in other orders,
    and though a host may wait for its GPU anywhere between.
    host: of row_bytes, with number_of_flags(groups). The device has as many bytes for each rank: 0.35 GB for a ViT-B
    on 2 ranks whose gradients travel in bfloat16, else 0.7.

    A pass is what ranks do from their first `send` up to `end`, or up to `break_off`. Flags have the number of the
    pass in which something last happened: that a group was sent, that everything was, and that everything was read.
    """

    def __init__(self, shapes: list[torch.Size], dtypes: list[torch.dtype], groups: list[list[int]], host: HostRows):
        self.dtypes, self._groups, self._host = dtypes, groups, host
        rank, world, device = host.rank, len(host.rows), host.device
        # Ranks begin with different senders, so that none has all readers at once.
        self._others = [(rank + step) % world for step in range(1, world)]
        self._all_sent, self._all_read = len(groups), len(groups) + 1  # flags; those before are of the groups
        self._group_of = {index: number for number, group in enumerate(groups) for index in group}
        self._pass = 0
        self._next_pass()
        sizes = [shape.numel() for shape in shapes]
        self._spans = _spans(sizes, dtypes, groups)
        self._received_RB = torch.empty(world, row_bytes(sizes, dtypes), dtype=torch.uint8, device=device)
        spans = zip(self._spans, shapes, dtypes, strict=True)
        self._own = [self._received_RB[rank, span].view(dtype).view(shape) for span, shape, dtype in spans]
        self._received, places = _by_dtype(self._received_RB, self._spans, dtypes)
        self._averages = [(*place, own.shape, own.stride()) for place, own in zip(places, self._own, strict=True)]
        on_gpu = device.type == "cuda"
        self._out, self._into = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._mean = torch.compile(_mean, dynamic=False) if on_gpu else _mean  # one kernel that reads all once
        with torch.no_grad():
            self._means()  # compiled here, before ranks wait for each other

    def _means(self) -> list[Tensor]:
        return [self._mean(received_RL) for received_RL in self._received]

    def _next_pass(self) -> None:
        self._pass += 1
        self._given: dict[int, Tensor] = {}  # by index
        self._given_again: set[int] = set()
        self._missing = [set(group) for group in self._groups]  # of a group that was sent, nothing
        self._number_received = 0  # groups

    def send(self, index: int, gradient: Tensor) -> None:
        """To all ranks, once its group is complete. Its memory must stay as it is until the end of the pass.

        What is sent again in the same pass, on all ranks then, takes the place of what was sent before.
        """
        if not self._given:
            self._begin()
        number = self._group_of[index]
        was_sent = not self._missing[number]
        if index in self._given:  # also where it has not left yet: on another rank it may have
            self._given_again.add(index)
        self._given[index] = gradient
        self._missing[number].discard(index)
        if was_sent:
            with _beside(self._out):
                self._copy_out([index])
        elif not self._missing[number]:
            self._send_group(number)

    def _begin(self) -> None:
        with _beside(self._into):
            pass  # what was received last has been read
        with _on(self._out):
            for other in self._others:
                self._host.expect(other, self._all_read, self._pass - 1)  # and so has what this rank sent

    def _send_group(self, number: int) -> None:
        with _beside(self._out):
            self._copy_out(self._groups[number])
            self._host.announce(number, self._pass)
        with _on(self._into):
            while self._number_received < len(self._groups) and not self._missing[self._number_received]:
                for other in self._others:
                    self._host.expect(other, self._number_received, self._pass)
                    self._copy_in(other, self._groups[self._number_received])
                self._number_received += 1

    def _copy_out(self, indices: list[int]) -> None:
        torch._foreach_copy_([self._own[i] for i in indices], [self._given[i] for i in indices])
        rank, span = self._host.rank, self._span(indices)
        self._host.rows[rank][span].copy_(self._received_RB[rank, span], non_blocking=True)

    def _copy_in(self, other: int, indices: list[int]) -> None:
        span = self._span(indices)
        self._received_RB[other, span].copy_(self._host.rows[other][span], non_blocking=True)

    def _span(self, indices: list[int]) -> slice:
        """The bytes of a group, or of one gradient, in a row."""
        return slice(self._spans[indices[0]].start, self._spans[indices[-1]].stop)

    def break_off(self) -> None:
        """End a pass without averages, as all ranks must: nobody waits any longer for what this one has not sent."""
        with _on(self._out):
            for number in range(len(self._groups)):
                self._host.announce(number, self._pass)
        self.end()

    def averages(self) -> list[Tensor]:
        """Of all gradients of the pass that has ended, by index, once all ranks have sent them."""
        if self._into is not None:
            torch.cuda.current_stream().wait_stream(self._into)
        means = self._means()
        return [means[n].as_strided(shape, stride, offset) for n, offset, shape, stride in self._averages]

    def end(self) -> None:
        """End a pass in which all gradients were sent. The current stream waits until they have left."""
        with _on(self._out):
            self._host.announce(self._all_sent, self._pass)
        with _on(self._into):
            if self._given_again:  # of which the others' flags may have been those of what they sent before
                for other in self._others:
                    self._host.expect(other, self._all_sent, self._pass)
                    for index in self._given_again:
                        self._copy_in(other, [index])
            self._host.announce(self._all_read, self._pass)
        if self._out is not None:
            torch.cuda.current_stream().wait_stream(self._out)
        self._next_pass()


@contextlib.contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """After all that the current stream has been given so far, and beside what it is given next."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with _on(stream):
        yield


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def grouped(sizes: list[int], dtypes: list[torch.dtype], first_small: int, order: list[int]) -> list[list[int]]:
    """The gradients that travel together, each group of one dtype, in about the order in which groups are complete.

    order: in which those before number first_small are most likely sent, as indices. The others are the last group.
    """
    groups, begun, left = [], {}, sum(sizes[index] for index in order)
    for index in order:
        group = begun.setdefault(dtypes[index], [])
        group.append(index)
        size = sum(sizes[i] for i in group)
        if size >= max(_LEAST, left // _OF_THE_REST):
            groups.append(begun.pop(dtypes[index]))
            left -= size
    small = [*range(first_small, len(sizes))]
    return [*groups, *begun.values(), *([small] if small else [])]


def number_of_flags(groups: list[list[int]]) -> int:
    """That an Exchange announces by."""
    return len(groups) + 2


def row_bytes(sizes: list[int], dtypes: list[torch.dtype]) -> int:
    """Of what one rank sends, as an Exchange has it."""
    return sum(map(_padded, sizes, dtypes))


def _padded(size: int, dtype: torch.dtype) -> int:
    length = size * dtype.itemsize
    return length + -length % _ALIGNED


def _spans(sizes: list[int], dtypes: list[torch.dtype], groups: list[list[int]]) -> list[slice]:
    """The bytes of each gradient in a row, by index. Groups lie side by side, and so do all those of one dtype."""
    spans, begin = [slice(0)] * len(sizes), 0
    for index in itertools.chain(*sorted(groups, key=lambda group: str(dtypes[group[0]]))):
        spans[index] = slice(begin, begin + sizes[index] * dtypes[index].itemsize)
        begin += _padded(sizes[index], dtypes[index])
    return spans


def _by_dtype(received_RB: Tensor, spans: list[slice], dtypes: list[torch.dtype]):
    """received_RL of each dtype there is; and, by index, in which of them a gradient is, and at which element."""
    received, places = [], [(0, 0)] * len(spans)
    for number, dtype in enumerate(dict.fromkeys(dtypes)):
        indices = [index for index, other in enumerate(dtypes) if other == dtype]
        begin, end = min(spans[i].start for i in indices), max(spans[i].stop for i in indices)
        received.append(received_RB[:, begin : end + -end % _ALIGNED].view(dtype))
        for i in indices:
            places[i] = number, (spans[i].start - begin) // dtype.itemsize
    return received, places


def _mean(received_RL: Tensor) -> Tensor:
    rows = received_RL.unbind()
    total_L = rows[0].float()
    for row_L in rows[1:]:
        total_L = total_L + row_L.float()
    return total_L / len(rows)
