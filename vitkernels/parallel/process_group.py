"""Processes in one torch.distributed group: host communication through gloo, heartbeats, and joint exit."""

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.parallel.base import Parallel
from vitkernels.parallel.heartbeat import Heartbeat


class ProcessGroup(Parallel):
    """Processes that communicate through gloo on the host, since the device's queue would delay each message.

    A subclass calls _join once it knows its rank and world.
    """

    def _join(self, backend: str, heartbeat: Heartbeat, **keywords) -> None:
        dist.init_process_group(backend, rank=self.rank, world_size=self.world, **keywords)
        self._host_group = dist.new_group(backend="gloo")
        self.checkpoint_group = None if self.one_program else dist.new_group(backend="gloo")
        self._vote: tuple[dist.Work, Tensor] | None = None
        self._heartbeat = heartbeat
        heartbeat.start()

    @contextlib.contextmanager
    def _leave_on_error(self) -> Iterator[None]:
        """Surround the part of a constructor after _join, so that the other processes learn of an error in it."""
        try:
            yield
        except Exception as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def agree(self, requested: bool) -> bool:
        """Return the votes of the previous step, which have arrived by now, so nothing waits for them."""
        agreed = False
        if self._vote is not None:
            work, votes = self._vote
            work.wait()
            agreed = bool(votes)
        votes = torch.tensor(int(requested))
        self._vote = dist.all_reduce(votes, group=self._host_group, async_op=True), votes
        return agreed

    def gather(self, value) -> list:
        values = [None] * self.world
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def on_main(self, function: Callable, *args):
        result, error = None, None
        if self.is_main:
            try:
                result = function(*args)
            except Exception as raised:
                error = raised
        shared = [result, error is not None]
        dist.broadcast_object_list(shared, src=0, group=self._host_group)
        if error is not None:
            raise error
        if shared[1]:
            raise UsageError("aborted: rank 0 failed, see its log", code="parallel.main_failed")
        return shared[0]

    def __exit__(self, kind, error, trace) -> None:
        if error is None or isinstance(error, SystemExit):
            self.runtime.synchronize()  # the collectives that others wait for have been sent
            self._heartbeat.stop()  # before the rendezvous: a process that may leave must not count as lost
            self.gather(None)  # not dist.barrier, which picks an accelerator and fails on torch_xla's
            dist.destroy_process_group()
        elif getattr(error, "on_every_rank", False):
            self._heartbeat.fail_together(error)
        else:
            # A dead peer breaks our connection first; its missing heartbeat then aborts us before we report our error.
            self._heartbeat.fail(error)
