"""The Hopper kernels of `pallas_flash`, compiled by ptxas without a GPU: concurrent products, and few spills."""

import pytest
import torch
from hopper import needs_new_jax

from vitkernels.bridge import ptxas

pytestmark = needs_new_jax


@pytest.fixture(autouse=True, scope="module")
def _needs_ptxas():
    if (reason := ptxas.unavailable()) is not None:
        pytest.skip(reason)


# Tokens, head dim, what else the call has, and the bytes that each thread may spill with ptxas 13.0, summed over the
# kernels of the call. Each width of a last tile is code of its own.
CASES = [
    (145, 64, {}, 0),
    (165, 64, {}, 4),
    (176, 48, {}, 0),
    (197, 64, {}, 0),
    (201, 64, {}, 4),
    (256, 64, {}, 0),
    (128, 64, {}, 8),
    (50, 64, {}, 0),
    (256, 64, {"bias_shape": (1, 12)}, 8),
    (197, 64, {"bias_shape": (1, 12)}, 36),
    (49, 64, {"bias_shape": (1, 12)}, 8),
    (256, 64, {"chunks": (4, 4)}, 12),
    (144, 64, {"chunks": (3, 3)}, 0),
    (197, 64, {"bias_shape": (1, 12), "chunks": (4, 4)}, 56),
    (50, 64, {"bias_shape": (1, 12), "chunks": (1, 1)}, 8),
    (128, 64, {"bias_shape": (1, 12), "chunks": (2, 2)}, 8),
    (256, 64, {"bias_shape": (1, 12), "chunks": (4, 4)}, 24),
    (257, 64, {}, 4),
    (300, 64, {}, 0),
    (313, 96, {}, 0),
    (385, 64, {}, 32),
    (476, 64, {}, 20),
    (544, 64, {}, 16),
    (577, 64, {}, 0),
    (601, 56, {}, 0),
    (777, 64, {}, 0),
    (1025, 64, {}, 0),
    (1601, 64, {}, 0),
    (577, 80, {}, 16),
    (257, 128, {}, 56),
    (300, 128, {}, 64),
    (544, 128, {}, 44),
    (601, 128, {}, 84),
    (1025, 128, {}, 48),
    (2305, 128, {}, 48),
    (4096, 128, {}, 4),
    (601, 128, {"chunks": (10, 10)}, 168),
    (1500, 128, {"chunks": (46, 46)}, 44),
    (2304, 64, {}, 4),
    (300, 64, {"is_causal": True}, 52),
    (601, 64, {"bias_shape": (1, 12)}, 0),
    (601, 64, {"chunks": (10, 10)}, 64),
    (1500, 64, {"chunks": (46, 46)}, 108),  # packed segments
]


@pytest.mark.parametrize("tokens, head_dim, extras, most", CASES, ids=[str(case[:3]) for case in CASES])
def test_kernels__serialize_no_products_and_spill_within_limits(tokens, head_dim, extras, most):
    """With too few registers for its accumulators, ptxas serializes a kernel's products (C7512), which is slow."""
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels

    options = {"is_causal": False, "scale": 0.1, "packed": True, "device": torch.device("cuda", 0)} | extras
    # With this batch, the compiler cannot infer the indices of heads.
    call = AttentionKernels(64, 12, tokens, tokens, head_dim, torch.bfloat16, **options)
    reports = ptxas.reports([kernel.module for kernel in call.launched(True, "bias_shape" in extras)])
    assert not any(report.serialized for report in reports), "\n".join(report.text for report in reports)
    assert sum(report.spill_stores for report in reports) <= most, "\n".join(report.text for report in reports)


def test_hopper_report__names_the_kernels(capsys):
    from scripts import hopper_report

    hopper_report.main(["64,16,577,64"])
    _, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    assert rows == [["64,16,577,64", name, "0", "0", "concurrent"] for name in ("forward", "starts", "fused_backward")]


@pytest.mark.parametrize(
    "shape, message",
    [("64,16", "'64,16' is not B,H,N,D"), ("0,1,2,64", "must be positive"), ("1,1,9,300", "32 to 128 in steps of 8")],
)
def test_hopper_report__refuses_a_shape(shape, message, capsys):
    from scripts import hopper_report

    with pytest.raises(SystemExit):
        hopper_report.main([shape])
    assert message in capsys.readouterr().err


def test_reports__of_what_is_no_module():
    with pytest.raises(RuntimeError, match="could not compile"):
        ptxas.reports([b"no module"])
