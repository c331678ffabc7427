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


class _Sdpa(_OnEachDevice):
    def test_bias__of_any_finite_size(self, device, dtype, of_bias):
        if device == "cuda":  # it saves only the log-sum-exp, which rounds to the maximum where the bias is so large
            pytest.skip("PyTorch's CUDA kernel differs from its CPU kernel in rows of such biases")
        super().test_bias__of_any_finite_size(device, dtype, of_bias)

    test_bias__of_any_finite_size.pytestmark = AttentionConformance.test_bias__of_any_finite_size.pytestmark


for _name in attention.names():
    _class = f"Test_{_name}"
    _base = _Sdpa if _name == "sdpa" else _OnEachDevice
    globals()[_class] = type(_class, (_base,), {"backend": _name, "slow_on_cpu": _name in INTERPRETED})
