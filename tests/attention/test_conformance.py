"""The conformance suite for every registered backend, including those of installed packages."""

import pytest

from vitkernels import attention
from vitkernels.testing import AttentionConformance

INTERPRETED = ("triton_flash", "pallas_flash")  # on a CPU


class _OnEachDevice(AttentionConformance):
    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def device(self, request):
        return request.param

    test_half_precision_packed = pytest.mark.gpu(AttentionConformance.test_half_precision_packed)


for _name in attention.names():
    _class = f"Test_{_name}"
    globals()[_class] = type(_class, (_OnEachDevice,), {"backend": _name, "slow_on_cpu": _name in INTERPRETED})
