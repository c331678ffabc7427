"""triton_flash's loops over batch entries in the single-tile kernels of short sequences."""

import pytest
import torch

pytest.importorskip("triton")

from vitkernels.attention.triton_flash import launch, operators, tiling
from vitkernels.attention.triton_flash.single_tile import single_tile_backward_kernel, single_tile_forward_kernel
from vitkernels.bridge.triton import multiprocessors
from vitkernels.testing import attention_reference
from vitkernels.testing.attention_harness import AttentionHarness, check_reruns

FORWARD, BACKWARD = single_tile_forward_kernel, single_tile_backward_kernel
# Runs of one entry, of several with a shorter last one, and of the entire batch.
PROGRAMS = (1, 4, 64)
# On CUDA, float32 calls run on the general kernels; see fits_one_tile.
SINGLE_TILE_DTYPE = {"cpu": torch.float32, "cuda": torch.float16}


def draw(device, *sizes, M=None):
    return attention_reference.draw(device, *sizes, SINGLE_TILE_DTYPE[device], M)


def draw_packed(device, *sizes):
    return attention_reference.draw_packed(device, *sizes, SINGLE_TILE_DTYPE[device])


@pytest.mark.parametrize("entries, owners", [(8192, 4), (128, 32), (1, 1), (0, 5), (7, 3), (100, 5000)])
def test_runs__cover_the_entries_and_bound_the_programs(entries, owners):
    device = torch.device("cpu")
    parts, length = tiling.runs(entries, owners, device)
    assert parts * length >= entries > (parts - 1) * length or (entries, parts) == (0, 1)
    assert parts * owners <= max(owners, tiling.PROGRAMS_PER_MULTIPROCESSOR * multiprocessors(device))


class TestRuns(AttentionHarness):
    backend = "triton_flash"

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
    def device(self, request):
        return request.param

    @pytest.fixture(params=PROGRAMS, autouse=True)
    def programs(self, request, device, monkeypatch):
        """Set how many programs the runs fill: few of them loop over the batch, as large batches do on a GPU."""
        monkeypatch.setattr(tiling, "PROGRAMS_PER_MULTIPROCESSOR", request.param)
        monkeypatch.setattr(tiling, "_multiprocessors", lambda device: 1)
        # Launches kept by earlier tests would run programs of their number, unseen by `launched`.
        monkeypatch.setattr(launch, "_bound", {})
        monkeypatch.setattr(operators, "_forward_launches", {})
        monkeypatch.setattr(operators, "_backward_launches", {})

    @pytest.fixture
    def launched(self, monkeypatch):
        """Record the kernels that run."""
        seen, run = [], launch._launch
        monkeypatch.setattr(launch, "_launch", lambda *args: seen.append(args[1]) or run(*args))
        return seen

    @pytest.mark.parametrize(
        "B, H, N, M, D",
        [(9, 2, 49, 49, 32), (3, 1, 33, 50, 64), (5, 2, 16, 7, 40), (2, 3, 64, 64, 24), (4, 1, 1, 9, 16)],
    )
    def test_shapes(self, device, launched, B, H, N, M, D):
        leaves = draw(device, B, H, N, D, M=M)
        self.check(leaves)
        self.check(leaves, bias=torch.randn(1, H, N, M, device=device, requires_grad=True))
        assert launched == [FORWARD, BACKWARD] * 2

    @pytest.mark.parametrize("shape", [(2, 20, 20), (20, 20), (1, 2, 1, 20), (20,), (1, 2, 20, 20)])
    def test_bias__shared_by_the_batch(self, device, launched, shape):
        bias = torch.randn(shape, device=device, requires_grad=True)
        self.check(draw(device, 5, 2, 20, 32), bias=bias)
        self.check(draw(device, 5, 2, 20, 32), bias=bias.detach())
        assert launched == [FORWARD, BACKWARD] * 2

    @pytest.mark.parametrize("shape", [(5, 2, 20, 20), (5, 1, 1, 20)])
    def test_bias__of_each_entry(self, device, launched, shape):
        """Only its gradient needs the general kernels."""
        bias = torch.randn(shape, device=device)
        self.check(draw(device, 5, 2, 20, 32), bias=bias)
        assert launched == [FORWARD, BACKWARD]
        self.check(draw(device, 5, 2, 20, 32), bias=bias.requires_grad_())
        assert launched[2] is FORWARD and BACKWARD not in launched[3:]

    @pytest.mark.parametrize("N, dtype", [(9, torch.int64), (32, torch.int16), (49, torch.int32)])
    def test_windows(self, device, launched, N, dtype):
        """A shifted window's segments differ from entry to entry, and a bias is shared by all of them."""
        bias = torch.randn(2, N, N, device=device, requires_grad=True)
        ids = torch.randint(-1, 2, (7, N), device=device).to(dtype)
        self.check(draw(device, 7, 2, N, 32), bias=bias, segment_ids=ids)
        self.check(attention_reference.draw(device, 3, 2, N, 32, torch.bfloat16), bias=bias, segment_ids=ids[:3])
        assert launched == [FORWARD, BACKWARD] * 2

    @pytest.mark.parametrize("shape", [(5, 1, 1, 20), (5, 2, 20, 20), (20, 20)])
    def test_mask(self, device, shape):
        mask = torch.rand(shape, device=device) < 0.5
        mask[..., 0, :] = False  # queries, or an entire head, without keys
        extras = {"bias": torch.randn(1, 2, 20, 20, device=device, requires_grad=True), "mask": mask}
        self.check(draw(device, 5, 2, 20, 32), **extras)
        self.check(draw(device, 5, 2, 20, 32), **extras, is_causal=True, scale=-0.3)

    def test_packed(self, device, launched):
        self.check_packed(draw_packed(device, 3, 50, 2, 64))
        self.check_packed(
            draw_packed(device, 3, 50, 2, 64), segment_ids=torch.arange(50, device=device).expand(3, 50) // 20
        )
        assert launched == [FORWARD, BACKWARD] * 2

    def test_bias_gradient__is_bit_equal_in_reruns(self, device):
        leaves = draw(device, 3, 2, 49, 32)
        bias = torch.randn(1, 2, 49, 49, device=device, requires_grad=True)
        check_reruns(lambda: self.attend(*leaves, bias=bias), (*leaves, bias))
