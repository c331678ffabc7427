"""All-reduce of gradients between the GPUs of one host, through host memory and by their copy engines.

Gradients travel in buckets. A short kernel first copies a bucket's gradients into contiguous memory, which saves the
host one call per gradient. The route avoids NVLink: its active links slowed two H200s at their power limit by 2.4 %
although they carried almost no data (notes/parallel.md).

Shape suffixes: R ranks, B bytes of what one rank sends, L elements of one dtype in it.
"""

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from vitkernels.parallel.host_memory import SharedHostRows

_ALIGNMENT = 128  # bytes; each gradient starts at a multiple
_MIN_BUCKET_ELEMENTS = 2**20  # with fewer, the host's calls take longer than the transfer
_REMAINDER_PER_BUCKET = 8  # a bucket takes 1/8 of the remaining elements, so the last ones are small and quickly sent


class HostAllReduce:
    """Averages gradients over all ranks once per step: each rank receives every rank's bytes and computes the means.

    shapes, dtypes: of each gradient as it travels.
    buckets: which gradients travel together, as assign_buckets returns them; the same on all ranks. A rank receives
        buckets in this order, each once all buckets up to it have been sent. Ranks therefore never wait in a cycle,
        although they may send in different orders and a host may wait for its GPU at any point.
    host: rows of row_bytes, with flag_count(buckets) flags. The device holds as many bytes for each rank: 0.35 GB for
        a ViT-B on 2 ranks whose gradients travel in bfloat16, else 0.7.

    A pass lasts from a rank's first `send` to `finish` or `abort`. A flag holds the number of the pass in which its
    event last happened: a bucket was sent, everything was sent, or everything was read.
    """

    def __init__(
        self, shapes: list[torch.Size], dtypes: list[torch.dtype], buckets: list[list[int]], host: SharedHostRows
    ):
        self.dtypes, self._buckets, self._host = dtypes, buckets, host
        rank, world, device = host.rank, len(host.rows), host.device
        # Each rank starts with another sender, so that no row is read by all at once.
        self._others = [(rank + step) % world for step in range(1, world)]
        self._all_sent, self._all_read = len(buckets), len(buckets) + 1  # flags, after those of the buckets
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._pass = 0
        self._next_pass()
        sizes = [shape.numel() for shape in shapes]
        self._spans = _spans(sizes, dtypes, buckets)
        self._received_RB = torch.empty(world, row_bytes(sizes, dtypes), dtype=torch.uint8, device=device)
        spans = zip(self._spans, shapes, dtypes, strict=True)
        self._own = [self._received_RB[rank, span].view(dtype).view(shape) for span, shape, dtype in spans]
        self._received, places = _by_dtype(self._received_RB, self._spans, dtypes)
        self._averages = [(*place, own.shape, own.stride()) for place, own in zip(places, self._own, strict=True)]
        on_gpu = device.type == "cuda"
        self._send_stream, self._receive_stream = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._mean = torch.compile(_mean, dynamic=False) if on_gpu else _mean  # one kernel that reads each row once
        with torch.no_grad():
            self._means()  # compiles now, before ranks wait for each other

    def _means(self) -> list[Tensor]:
        return [self._mean(received_RL) for received_RL in self._received]

    def _next_pass(self) -> None:
        self._pass += 1
        self._sent: dict[int, Tensor] = {}  # by index
        self._sent_again: set[int] = set()
        self._missing = [set(bucket) for bucket in self._buckets]  # empty once the bucket has been sent
        self._received_buckets = 0

    def send(self, index: int, gradient: Tensor) -> None:
        """Send a gradient to all ranks once its bucket is complete. Its memory must not change until the pass ends.

        Sending a gradient again in the same pass replaces the earlier one; all ranks must then send it again.
        """
        if not self._sent:
            self._begin()
        number = self._bucket_of[index]
        bucket_was_sent = not self._missing[number]
        if index in self._sent:  # even if its bucket has not left this rank: on another it may have
            self._sent_again.add(index)
        self._sent[index] = gradient
        self._missing[number].discard(index)
        if bucket_was_sent:
            with _overlapping(self._send_stream):
                self._copy_out([index])
        elif not self._missing[number]:
            self._send_bucket(number)

    def _begin(self) -> None:
        with _overlapping(self._receive_stream):
            pass  # the averages of the last pass have been read
        with _on_stream(self._send_stream):
            for other in self._others:
                self._host.wait(other, self._all_read, self._pass - 1)  # and so have the gradients that this rank sent

    def _send_bucket(self, number: int) -> None:
        with _overlapping(self._send_stream):
            self._copy_out(self._buckets[number])
            self._host.signal(number, self._pass)
        with _on_stream(self._receive_stream):
            while self._received_buckets < len(self._buckets) and not self._missing[self._received_buckets]:
                for other in self._others:
                    self._host.wait(other, self._received_buckets, self._pass)
                    self._copy_in(other, self._buckets[self._received_buckets])
                self._received_buckets += 1

    def _copy_out(self, indices: list[int]) -> None:
        torch._foreach_copy_([self._own[i] for i in indices], [self._sent[i] for i in indices])
        rank, span = self._host.rank, self._span(indices)
        self._host.rows[rank][span].copy_(self._received_RB[rank, span], non_blocking=True)

    def _copy_in(self, other: int, indices: list[int]) -> None:
        span = self._span(indices)
        self._received_RB[other, span].copy_(self._host.rows[other][span], non_blocking=True)

    def _span(self, indices: list[int]) -> slice:
        """Return the bytes of a bucket, or of one gradient, in a row."""
        return slice(self._spans[indices[0]].start, self._spans[indices[-1]].stop)

    def abort(self) -> None:
        """End a pass without averages, as all ranks must; none then waits for gradients that this one has not sent."""
        with _on_stream(self._send_stream):
            for number in range(len(self._buckets)):
                self._host.signal(number, self._pass)
        self.finish()

    def averages(self) -> list[Tensor]:
        """Return the averages of the finished pass, by index, once all ranks have sent their gradients."""
        if self._receive_stream is not None:
            torch.cuda.current_stream().wait_stream(self._receive_stream)
        means = self._means()
        return [means[n].as_strided(shape, stride, offset) for n, offset, shape, stride in self._averages]

    def finish(self) -> None:
        """End a pass in which all gradients were sent. The current stream waits until they have left."""
        with _on_stream(self._send_stream):
            self._host.signal(self._all_sent, self._pass)
        with _on_stream(self._receive_stream):
            if self._sent_again:  # the bucket's flag may have been set for the earlier gradient
                for other in self._others:
                    self._host.wait(other, self._all_sent, self._pass)
                    for index in self._sent_again:
                        self._copy_in(other, [index])
            self._host.signal(self._all_read, self._pass)
        if self._send_stream is not None:
            torch.cuda.current_stream().wait_stream(self._send_stream)
        self._next_pass()


@contextlib.contextmanager
def _overlapping(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Switch to `stream`, ordered after the current stream's work so far and concurrent with its later work."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with _on_stream(stream):
        yield


def _on_stream(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def assign_buckets(sizes: list[int], dtypes: list[torch.dtype], first_small: int, order: list[int]) -> list[list[int]]:
    """Return the gradients that travel together, each bucket of one dtype, in the order in which buckets fill up.

    order: the indices below first_small in the order in which they are most likely sent. The indices from first_small
    on form the last bucket.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[torch.dtype, list[int]] = {}
    left = sum(sizes[index] for index in order)
    for index in order:
        bucket = open_buckets.setdefault(dtypes[index], [])
        bucket.append(index)
        size = sum(sizes[i] for i in bucket)
        if size >= max(_MIN_BUCKET_ELEMENTS, left // _REMAINDER_PER_BUCKET):
            buckets.append(open_buckets.pop(dtypes[index]))
            left -= size
    small = [*range(first_small, len(sizes))]
    return [*buckets, *open_buckets.values(), *([small] if small else [])]


def flag_count(buckets: list[list[int]]) -> int:
    """Return the number of flags that a HostAllReduce signals with."""
    return len(buckets) + 2


def row_bytes(sizes: list[int], dtypes: list[torch.dtype]) -> int:
    """Return the bytes of one rank's row."""
    return sum(map(_padded_bytes, sizes, dtypes))


def _padded_bytes(size: int, dtype: torch.dtype) -> int:
    length = size * dtype.itemsize
    return length + -length % _ALIGNMENT


def _spans(sizes: list[int], dtypes: list[torch.dtype], buckets: list[list[int]]) -> list[slice]:
    """Return the bytes of each gradient in a row, by index. Each bucket is contiguous, and so are those of a dtype."""
    spans, begin = [slice(0)] * len(sizes), 0
    for index in itertools.chain(*sorted(buckets, key=lambda bucket: str(dtypes[bucket[0]]))):
        spans[index] = slice(begin, begin + sizes[index] * dtypes[index].itemsize)
        begin += _padded_bytes(sizes[index], dtypes[index])
    return spans


def _by_dtype(received_RB: Tensor, spans: list[slice], dtypes: list[torch.dtype]):
    """Return received_RL of each dtype and, for each gradient, (which of them, first element in its row)."""
    received, places = [], [(0, 0)] * len(spans)
    for number, dtype in enumerate(dict.fromkeys(dtypes)):
        indices = [index for index, other in enumerate(dtypes) if other == dtype]
        begin, end = min(spans[i].start for i in indices), max(spans[i].stop for i in indices)
        received.append(received_RB[:, begin : end + -end % _ALIGNMENT].view(dtype))
        for i in indices:
            places[i] = number, (spans[i].start - begin) // dtype.itemsize
    return received, places


def _mean(received_RL: Tensor) -> Tensor:
    """Return the mean over ranks in float32, summed in rank order so that all ranks get the same bits."""
    rows = received_RL.unbind()
    total_L = rows[0].float()
    for row_L in rows[1:]:
        total_L = total_L + row_L.float()
    return total_L / len(rows)
