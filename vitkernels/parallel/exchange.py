"""Gradients of all ranks of one host, through its memory, by the GPUs' copy engines, and their mean.

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


class Exchange:
    """What the ranks send each other in one step, and have of each other then: a row of bytes for each of them.

    sizes, dtypes: of each gradient, in elements and as it travels; those from number first_small on are float32, and
    sent together. Gradients of one dtype lie side by side, so that one pass over them takes their mean.
    order: in which the others are most likely sent, as indices; the same on all ranks. They are received in this order,
    and each once all up to it are sent. So ranks never wait in a circle, though they may send in other orders, and
    though a host may wait for its GPU anywhere between.
    host: of row_bytes(sizes, dtypes), and with number_of_flags(first_small). The device has as many bytes for each
    rank: 0.35 GB for a ViT-B on 2 ranks whose gradients travel in bfloat16, else 0.7.

    A pass is what ranks do from their first `send` up to `end`, or up to `break_off`. Flags have the number of the
    pass in which something last happened: that a large gradient was sent, that all small ones were, that everything
    was, and that everything was read.
    """

    def __init__(self, sizes: list[int], dtypes: list[torch.dtype], first_small: int, order: list[int], host: HostRows):
        self.dtypes, self._host, self._pass, self._begun = dtypes, host, 1, False
        rank, world, device = host.rank, len(host.rows), host.device
        # Ranks begin with different senders, so that none has all readers at once.
        self._others = [(rank + step) % world for step in range(1, world)]
        spans = _spans(sizes, dtypes)
        length = row_bytes(sizes, dtypes)
        self._received_RB = torch.empty(world, length, dtype=torch.uint8, device=device)
        self._own = [self._received_RB[rank, span].view(dtype) for span, dtype in zip(spans, dtypes, strict=True)]
        self._first_small = first_small
        sent = spans[:first_small]
        if first_small < len(spans):
            sent.append(slice(spans[first_small].start, length))
        self._all_sent, self._all_read = len(sent), len(sent) + 1  # flags; those before are of what was sent, in order
        self._order = [*order, *range(first_small, len(sent))]
        self._sent, self._sent_again, self._number_received = set(), set(), 0  # in this pass
        rows = zip(host.rows, self._received_RB, strict=True)
        self._ways = [[(in_host[span], on_device[span]) for span in sent] for in_host, on_device in rows]  # by rank
        self._received, self._places = _by_dtype(self._received_RB, spans, dtypes)
        on_gpu = device.type == "cuda"
        self._out, self._into = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._mean = torch.compile(_mean, dynamic=False) if on_gpu else _mean  # one kernel that reads all once
        with torch.no_grad():
            self._means()  # compiled here, before ranks wait for each other

    def _means(self) -> list[Tensor]:
        return [self._mean(received_RL) for received_RL in self._received]

    def send(self, gradients: list[tuple[int, Tensor]]) -> None:
        """To all ranks, by index. Their memory must stay as it is until the end of the pass.

        What is sent again in the same pass, on all ranks then, takes the place of what was sent before.
        """
        self._begin()
        with _beside(self._out):
            for index, gradient in gradients:
                self._own[index].copy_(gradient.view(-1), non_blocking=True)
                self._publish(index)
        self._receive([index for index, _ in gradients])

    def send_small(self, gradients: list[Tensor]) -> None:
        """To all ranks, all of them from number first_small on."""
        if not gradients:
            return
        self._begin()
        with _beside(self._out):
            torch._foreach_copy_(self._own[self._first_small :], [gradient.view(-1) for gradient in gradients])
            self._publish(self._first_small)
        self._receive([self._first_small])

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        with _beside(self._into):
            pass  # what was received last has been read
        with _on(self._out):
            for other in self._others:
                self._host.expect(other, self._all_read, self._pass - 1)  # and so has what this rank sent

    def _publish(self, flag: int) -> None:
        in_host, on_device = self._ways[self._host.rank][flag]
        in_host.copy_(on_device, non_blocking=True)
        self._host.announce(flag, self._pass)

    def _receive(self, flags: list[int]) -> None:
        """What the others send under these flags, and under those that wait for them."""
        for flag in flags:  # of what is sent again, the others' flags may still be of what they sent before
            (self._sent_again if flag in self._sent else self._sent).add(flag)
        with _on(self._into):
            while self._number_received < len(self._order) and self._order[self._number_received] in self._sent:
                flag = self._order[self._number_received]
                self._number_received += 1
                for other in self._others:
                    self._host.expect(other, flag, self._pass)
                    self._take(other, flag)

    def _take(self, other: int, flag: int) -> None:
        in_host, on_device = self._ways[other][flag]
        on_device.copy_(in_host, non_blocking=True)

    def break_off(self) -> None:
        """End a pass without averages, as all ranks must: nobody waits any longer for what this one has not sent."""
        with _on(self._out):
            for flag in range(self._all_sent):
                self._host.announce(flag, self._pass)
        self.end()

    def averages(self) -> list[Tensor]:
        """Of all gradients of the pass that has ended, flat, by index, once all ranks have sent them."""
        if self._into is not None:
            torch.cuda.current_stream().wait_stream(self._into)
        means = self._means()
        return [means[region][span] for region, span in self._places]

    def end(self) -> None:
        """End a pass in which all gradients were sent. The current stream waits until they have left."""
        with _on(self._out):
            self._host.announce(self._all_sent, self._pass)
        with _on(self._into):
            for flag, other in itertools.product(self._sent_again, self._others):
                self._host.expect(other, self._all_sent, self._pass)
                self._take(other, flag)
            self._host.announce(self._all_read, self._pass)
        self._sent, self._sent_again, self._number_received = set(), set(), 0
        self._pass, self._begun = self._pass + 1, False
        if self._out is not None:
            torch.cuda.current_stream().wait_stream(self._out)


@contextlib.contextmanager
def _beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """After all that the current stream has been given so far, and beside what it is given next."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with _on(stream):
        yield


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def number_of_flags(first_small: int) -> int:
    """That an Exchange announces by."""
    return first_small + 3


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
