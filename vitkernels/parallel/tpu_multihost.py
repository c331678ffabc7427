"""Several hosts of a TPU slice: one process on each, and one program over all chips.

As torch_xla documents it: a gloo group for talk on the host, and ShardingSpec's `minibatch`, by which each process
gives the rows of a batch that its own chips get. These are side by side in the mesh, in the order of the processes.
Hosts are numbered as in the slice's metadata, and not as torch_xla's `xla://` rendezvous does, by the TPU's driver: who
writes the run's folder is so known before the TPU is opened, and nothing relies on how the two numbers go together.

What is wrong here would be wrong in silence, so that all is tried before it is used: see Pod._check.
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
from vitkernels.parallel.heartbeat import Watch
from vitkernels.parallel.processes import Group
from vitkernels.parallel.tpu_spmd import SpmdData, SpmdFsdp
from vitkernels.runtime import Runtime
from vitkernels.runtime.xla import Host

PORT = 12355  # where torch_xla too would have the hosts meet, unless MASTER_PORT is set
MEET_SECONDS = 300  # until all hosts must have come
PROBE_SECONDS = 300  # of the first program together, compilation included


class Pod(Group):
    """One host of several, before an engine of spmd.py among the base classes: it then works for all chips.

    Raises UsageError, on all hosts, where chips, batches, sums, parameters or weights are not what training relies on.
    """

    def __init__(self, runtime: Runtime, host: Host, lost_after: float):
        self.rank, self.world = host.rank, len(host.addresses)
        address = host.addresses[0], int(os.environ.get("MASTER_PORT", PORT))
        store = _meet(address, self.rank, self.world)
        self._join("gloo", Watch(self.rank, self.world, lost_after, address, keeps_store=self.is_main), store=store)
        with self._leaving_on_errors():
            super().__init__(runtime)
            self._check()

    def _chips(self) -> list[int]:
        """Each host's own chips side by side, in the order in which torch_xla deals its rows out to them."""
        everyone = self.gather(_own_chips())
        chips = [chip for own in everyone for chip in own]
        sizes = {len(own) for own in everyone}
        if sorted(chips) != super()._chips() or len(sizes) > 1:
            raise UsageError(
                f"the hosts of this slice do not share its {len(super()._chips())} chips evenly, each chip on one "
                f"host: by rank they have {everyone}. Start train.py once on each host of one slice"
            )
        return chips

    def describe(self) -> str:
        return f"{super().describe()} of {self.world} hosts"

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        """Raises UsageError where the hosts have made different weights: each gives its chips its own."""
        mend = "all need the same versions of all packages, and the same file where model.pretrained names one"
        self.expect_same("the model's weights", _checksum(model), mend)
        return super().wrap(model, compiled, mode)

    # ---- before training ----

    def _check(self) -> None:
        """Raise UsageError, on all hosts, unless numbers that go the ways of training come out as they must."""
        late = f"the hosts' first program together was not done within {PROBE_SECONDS} s: not all are in one slice"
        alarm = threading.Timer(PROBE_SECONDS, self._watch.end_all, [late])
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
            "the number of images beside their targets": len(rows),
            "a split parameter": [row // (2 * self.local_devices) for row in rows],
        }
        for rank, one in enumerate(self.gather(found)):
            for what, value in expected.items():
                if one[what] != value:
                    raise UsageError(
                        f"this slice's {self.world} hosts cannot train together: on rank {rank}, {what} came to "
                        f"{reprlib.repr(one[what])} and not to {reprlib.repr(value)}. Nothing was trained"
                    )

    def _probe(self) -> dict:
        """What becomes of two rows for each chip, and of a parameter that holds the number of the host that gave it."""
        own = 2 * self.local_devices
        rows = torch.arange(own) + own * self.rank
        ((images, targets),) = self.feed([(rows[:, None].float(), rows)])
        total, matches = self.runtime.read([images.sum(), (images[:, 0].long() == targets).sum()])
        parameter = torch.full((2 * self.devices,), float(self.rank)).to(self.runtime.device)
        self._place(parameter, 0)
        return {
            "the rows of a batch": images.flatten().cpu().tolist(),
            "the sum over a batch": total,
            "the number of images beside their targets": matches,
            "a split parameter": parameter.cpu().tolist(),
        }


class PodData(Pod, SpmdData):
    """Every chip of all hosts has the whole model and its part of each batch."""


class PodFsdp(Pod, SpmdFsdp):
    """Every chip of all hosts has a part of each parameter and its part of each batch."""


def _meet(address: tuple[str, int], rank: int, world: int) -> dist.Store:
    """A store that the first host keeps, once all have come to it."""
    try:
        return dist.TCPStore(*address, world, is_master=rank == 0, timeout=timedelta(seconds=MEET_SECONDS))
    except dist.DistError as error:
        where = "{}:{}".format(*address)
        raise UsageError(
            f"the {world} hosts of this slice did not meet at {where} within {MEET_SECONDS} s ({error}): start "
            "train.py on every host, and end what is left of a run before; MASTER_PORT chooses another port"
        ) from error


def _own_chips() -> list[int]:
    """This process's chips, by their numbers in torch_xla, in the order in which it deals rows out to them."""
    import torch_xla

    return [int(name.rpartition(":")[2]) for name in torch_xla._XLAC._xla_get_runtime_devices()]


def _checksum(model: nn.Module) -> int:
    checksum = 0
    for tensor in model.state_dict().values():
        checksum = zlib.crc32(tensor.detach().cpu().flatten().view(torch.uint8).numpy(), checksum)
    return checksum
