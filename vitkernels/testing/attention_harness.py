"""Shared parts of attention tests: devices, poisoned memory, the comparison with the reference, and reruns."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from vitkernels import attention
from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError
from vitkernels.testing.attention_reference import TOLERANCE, reference, relative_error, unchanged, unpacked


def check_reruns(attend: Callable[[], Tensor], inputs: Sequence[Tensor]) -> None:
    """Check that the output of `attend`, and the gradients of its inputs, have the same bits in a second call."""

    def run():
        out = attend()
        return out, *torch.autograd.grad(out, inputs, torch.ones_like(out).cumsum(-1))

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def check_result(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check the shape and dtype of a result, and that it has a gradient."""
    assert out.shape == shape and out.dtype == dtype
    assert out.requires_grad, "the result has no gradient: run must be differentiable, or define a backward pass"


class AttentionHarness:
    """Fixtures and checks for the backend that a subclass names."""

    backend: str | AttentionBackend
    slow_on_cpu = False

    # SDPA's backward kernels warn, because poisoned memory requires deterministic algorithms.
    pytestmark = pytest.mark.filterwarnings("ignore:.* defaults to a non-deterministic algorithm:UserWarning")

    @pytest.fixture(params=["cpu", "cuda"])
    def device(self, request):
        if request.param == "cuda" and not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        return request.param

    @pytest.fixture(autouse=True)
    def poisoned_memory(self):
        """Fill new tensors with NaN, which exposes elements that a kernel does not write."""
        was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert torch.utils.deterministic.fill_uninitialized_memory
        yield
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])

    @property
    def attend(self) -> AttentionBackend:
        return attention.get(self.backend) if isinstance(self.backend, str) else self.backend

    def taken(self, *args, **keywords) -> AttentionBackend:
        """Return the backend; skip if it refuses the call, and check that the call itself gives the same reason."""
        reason = self.attend.unsupported(*args, **keywords)
        assert reason is None or (isinstance(reason, str) and reason), f"refusal must return None or why: {reason!r}"
        if reason is not None:
            with pytest.raises(UsageError) as raised:
                self.attend(*args, **keywords)
            assert raised.value.code == "registry.unsupported" and raised.value.fields["reason"] == reason
            assert reason in str(raised.value)
            pytest.skip(reason)
        return self.attend

    def skip_long(self, device, N):
        if device == "cpu" and (257 if self.slow_on_cpu else 1025) < N:
            pytest.skip("takes too long on a CPU; runs on a GPU")

    def check(self, leaves, tolerance=None, **extras):
        """Check forward, dq, dk, dv and dbias of separate q, k and v."""
        backend = self.taken(*leaves, **extras)
        inputs = [*leaves, *(x for x in [extras.get("bias")] if x is not None and x.requires_grad)]
        with unchanged(*leaves, *extras.values()):
            out = backend(*leaves, **extras)
            check_result(out, leaves[0].shape, leaves[0].dtype)
            do = torch.randn_like(out)
            with unchanged(out, do):
                grads = torch.autograd.grad(out, inputs, do)

        copies = [x.detach().double().requires_grad_() for x in inputs]
        if len(copies) == 4:
            extras = extras | {"bias": copies[3]}
        exact = reference(*copies[:3], **extras)
        exact_grads = torch.autograd.grad(exact, copies, do.double())
        tolerance = tolerance or TOLERANCE[out.dtype]
        for what, x, y in zip(("out", "dq", "dk", "dv", "dbias"), (out, *grads), (exact, *exact_grads), strict=False):
            assert relative_error(x, y) < tolerance, what

    def check_packed(self, qkv, **extras):
        """Check forward and gradient of packed qkv."""
        backend = self.taken(*unpacked(qkv), **extras)
        with unchanged(qkv, *extras.values()):
            out = backend.qkvpacked(qkv, **extras)
            B, N, _, H, D = qkv.shape
            check_result(out, (B, N, H * D), qkv.dtype)
            do = torch.randn_like(out)
            with unchanged(out, do):
                (dqkv,) = torch.autograd.grad(out, qkv, do)
        copy = qkv.detach().double().requires_grad_()
        exact = reference(*unpacked(copy), **extras).transpose(1, 2).flatten(2)
        (exact_grad,) = torch.autograd.grad(exact, copy, do.double())
        assert relative_error(out, exact) < TOLERANCE[qkv.dtype]
        assert relative_error(dqkv, exact_grad) < TOLERANCE[qkv.dtype]
