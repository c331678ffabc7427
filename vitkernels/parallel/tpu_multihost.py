"""Several hosts of a TPU slice: one process on each, and one SPMD program over all chips.

As torch_xla documents it: a gloo group communicates on the host, and with ShardingSpec's `minibatch` each process
supplies the rows of a batch for its own chips, which are adjacent in the mesh, in the order of the processes. Hosts are
numbered by the slice's metadata, not by torch_xla's `xla://` rendezvous, which asks the TPU's driver: the process that
writes the run's folder is then known before the TPU is opened, and nothing depends on how the two numberings match.

A mistake here would silently corrupt training, so Multihost._check probes every assumption before training.
"""

import os
import reprlib
import threading
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from vitkernels.errors import UsageError
from vitkernels.parallel.heartbeat import Heartbeat
from vitkernels.parallel.process_group import ProcessGroup
from vitkernels.parallel.tpu_spmd import SpmdDdp, SpmdFsdp
from vitkernels.runtime import Runtime
from vitkernels.runtime.xla import Host

PORT = 12355  # torch_xla's rendezvous port; MASTER_PORT overrides it
RENDEZVOUS_SECONDS = 300  # until all hosts must have arrived
PROBE_SECONDS = 300  # for the first joint program, including its compilation


class Multihost(ProcessGroup):
    """Mixin for one of several hosts. List it before an SPMD strategy among the bases; that then covers all chips.

    Raises UsageError, on all hosts, if chips, batches, sums, parameters or weights do not behave as training assumes.
    """

    def __init__(self, runtime: Runtime, host: Host, lost_after: float):
        self.rank, self.world = host.rank, len(host.addresses)
        address = host.addresses[0], int(os.environ.get("MASTER_PORT", PORT))
        store = _rendezvous(address, self.rank, self.world)
        heartbeat = Heartbeat(self.rank, self.world, lost_after, address, keeps_store=self.is_main)
        self._join("gloo", heartbeat, store=store)
        with self._leave_on_error():
            super().__init__(runtime)
            self._check()

    def _mesh_chips(self) -> list[int]:
        """Return each host's chips in turn, in the order in which torch_xla assigns them its rows."""
        chips_by_rank = self.gather(_own_chips())
        chips = [chip for own in chips_by_rank for chip in own]
        all_chips = super()._mesh_chips()  # type: ignore[misc]  # the SPMD strategy's
        if sorted(chips) != all_chips or len({len(own) for own in chips_by_rank}) > 1:
            raise UsageError(
                f"the hosts of this slice must split its {len(all_chips)} chips evenly, each chip on one host, but by "
                f"rank they have {chips_by_rank}. Start one process on each host of one slice",
                code="parallel.chips",
                chips_by_rank=chips_by_rank,
            )
        return chips

    def describe(self) -> str:
        return f"{super().describe()} of {self.world} hosts"

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        """Wrap the model. UsageError if the hosts built different weights, since each loads its own to its chips."""
        fix = "all hosts need the same package versions, and the same file of pretrained weights if there is one"
        self.expect_same("the model's weights", _checksum(model), fix)
        return super().wrap(model, compiled, mode)

    # ---- before training ----

    def _check(self) -> None:
        """Raise UsageError, on all hosts, unless a probe of everything that training relies on gives known numbers."""
        timeout = f"the hosts' first joint program did not finish within {PROBE_SECONDS} s: not all are in one slice"
        alarm = threading.Timer(PROBE_SECONDS, self._heartbeat.abort_all, [timeout])
        alarm.daemon = True
        alarm.start()
        try:
            found = self._probe()
        finally:
            alarm.cancel()
        rows = range(2 * self.devices)
        expected = {
            "the rows of a batch": list(rows),
            "the sum over a batch": sum(rows),
            "the number of images with their own targets": len(rows),
            "a sharded parameter": [row // (2 * self.local_devices) for row in rows],
        }
        for rank, one in enumerate(self.gather(found)):
            for what, value in expected.items():
                if one[what] != value:
                    raise UsageError(
                        f"this slice's {self.world} hosts cannot train together: on rank {rank}, {what} should be "
                        f"{reprlib.repr(value)} but is {reprlib.repr(one[what])}. Nothing was trained",
                        code="parallel.probe",
                        rank=rank,
                        what=what,
                        found=one[what],
                        expected=value,
                    )

    def _probe(self) -> dict:
        """Return what a joint program makes of two rows per chip and a parameter filled with its host's rank."""
        own = 2 * self.local_devices
        rows = torch.arange(own) + own * self.rank
        ((images, targets),) = self.feed([(rows[:, None].float(), rows)])
        total, matches = self.runtime.read([images.sum(), (images[:, 0].long() == targets).sum()])
        parameter = torch.full((2 * self.devices,), float(self.rank)).to(self.runtime.device)
        self._shard(parameter, 0)  # type: ignore[attr-defined]  # the SPMD strategy's
        return {
            "the rows of a batch": images.flatten().cpu().tolist(),
            "the sum over a batch": total,
            "the number of images with their own targets": matches,
            "a sharded parameter": parameter.cpu().tolist(),
        }


class MultihostDdp(Multihost, SpmdDdp):
    """Every chip of all hosts holds a replica of the model and its shard of each batch."""


class MultihostFsdp(Multihost, SpmdFsdp):
    """Every chip of all hosts holds a shard of each parameter and its shard of each batch."""


def _rendezvous(address: tuple[str, int], rank: int, world: int) -> dist.Store:
    """Return a store kept by the first host, once all hosts have connected to it."""
    try:
        return dist.TCPStore(*address, world, is_master=rank == 0, timeout=timedelta(seconds=RENDEZVOUS_SECONDS))
    except dist.DistError as error:
        where = "{}:{}".format(*address)
        raise UsageError(
            f"the {world} hosts of this slice did not meet at {where} within {RENDEZVOUS_SECONDS} s ({error}): start "
            "the program on every host, after stopping processes of earlier runs; MASTER_PORT sets another port",
            code="parallel.rendezvous",
            address=where,
        ) from error


def _own_chips() -> list[int]:
    """Return this process's chips by torch_xla's numbers, in the order in which it assigns them its rows."""
    import torch_xla

    return [int(name.rpartition(":")[2]) for name in torch_xla._XLAC._xla_get_runtime_devices()]


def _checksum(model: nn.Module) -> int:
    checksum = 0
    for tensor in model.state_dict().values():
        checksum = zlib.crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy(), checksum)
    return checksum
