"""The Hopper kernels of `pallas_flash`, compiled by ptxas without a GPU: concurrent products, and few spills."""

import pytest
import torch
from hopper import needs_new_jax

from vitkernels.bridge import ptxas

pytestmark = needs_new_jax


@pytest.fixture(autouse=True)
def _needs_ptxas():
    if (reason := ptxas.unavailable()) is not None:
        pytest.skip(reason)


# Each width of a last tile is code of its own. spilled: bytes that each thread stores with ptxas 13.0, summed over the
# kernels of the call.
@pytest.mark.parametrize(
    "tokens, head_dim, extras, spilled",
    [
        (197, 64, {}, 164),
        (300, 64, {}, 64),
        (313, 96, {}, 0),
        (476, 64, {}, 0),
        (577, 64, {}, 0),
        (601, 56, {}, 0),
        (777, 64, {}, 0),
        (1025, 64, {}, 0),
        (1601, 64, {}, 24),
        (577, 80, {}, 0),
        (601, 128, {}, 200),
        (2304, 64, {}, 8),
        (300, 64, {"is_causal": True}, 272),
        (601, 64, {"bias_shape": (1, 12)}, 0),
        (601, 64, {"chunks": (10, 10)}, 24),
        (1500, 64, {"chunks": (46, 46)}, 368),  # packed segments
    ],
)
def test_kernels__serialize_no_products_and_spill_within_limits(tokens, head_dim, extras, spilled):
    """With too few registers for its accumulators, ptxas serializes a kernel's products (C7512), which is slow."""
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels

    options = {"is_causal": False, "scale": 0.1, "packed": True, "device": torch.device("cuda", 0)} | extras
    # With this batch, the compiler cannot infer the indices of heads.
    call = AttentionKernels(64, 12, tokens, tokens, head_dim, torch.bfloat16, **options)
    reports = ptxas.reports([kernel.module for kernel in call.launched(True, "bias_shape" in extras)])
    assert not any(report.serialized for report in reports), "\n".join(report.text for report in reports)
    assert sum(report.spill_stores for report in reports) <= spilled, "\n".join(report.text for report in reports)


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
