"""The pairs of backend and device on which a conformance suite runs."""

import pytest

from vitkernels.registry.op import Op

ON_TPUS_AND_CPUS = ("pallas_tpu", "xla")  # they refuse tensors on NVIDIA GPUs: test_layouts checks that


def each_backend_and_device(op: Op) -> pytest.MarkDecorator:
    """Parametrize `backend, device`: every backend on the CPU, and on an NVIDIA GPU all but those for TPUs."""
    on_cpu = [pytest.param(name, "cpu") for name in op.names()]
    on_gpu = [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in op.names() if name not in ON_TPUS_AND_CPUS]
    return pytest.mark.parametrize("backend, device", on_cpu + on_gpu)
