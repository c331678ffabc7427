"""Conformance suite of generalized_box_iou and its loss: values and gradients against torchvision in float64."""

from functools import partial

import pytest
import torch
import torchvision
from expecting import error
from refused import skip_if_refused

from vitkernels.ops import GeneralizedBoxIoULoss, generalized_box_iou, generalized_box_iou_loss
from vitkernels.ops.generalized_box_iou import BACKENDS
from vitkernels.tpu_estimate import compiler

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_GPU = pytest.param("triton", "cuda", marks=pytest.mark.gpu)
HALVES_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (3, 37), (2, 130), (33, 5), (0, 4), (3, 0)]

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Degenerate boxes divide by zero, about which NumPy, the arithmetic of Triton's interpreter, warns.
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value) encountered:RuntimeWarning"),
]


def draw(shape, device, dtype=torch.float32):
    """Return boxes of many sizes, about half overlapping. A grid of quarters makes corners tie, exactly in bfloat16."""
    corner = torch.randint(0, 24, (*shape, 2), device=device)
    size = torch.randint(1, 24, (*shape, 2), device=device)
    return (torch.cat((corner, corner + size), dim=-1) / 4).to(dtype)


def degenerate(device):
    """Return pairs of points, lines, inverted, disjoint, touching, nested and equal boxes."""
    pairs = [
        ((1, 1, 1, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), (2, 2, 2, 2)), ((5, 1, 5, 4), (5, 1, 5, 4)),
        ((3, 3, 1, 1), (3, 3, 1, 1)), ((3, 3, 1, 1), (0, 0, 4, 4)), ((3, 0, 1, 2), (0, 0, 4, 4)),
        ((0, 0, 2, 2), (0, 0, 2, 2)), ((0, 0, 2, 2), (2, 0, 4, 2)), ((0, 0, 1, 1), (5, 5, 6, 7)),
        ((0, 0, 1, 1), (5, 5, 5, 5)), ((1, 1, 3, 3), (0, 0, 4, 4)), ((0, 0, 0, 3), (0, 1, 2, 2)),
    ]  # fmt: skip
    return torch.tensor(pairs, dtype=torch.float32, device=device).unbind(1)


def torchvision_giou(preds, targets):
    """Return the diagonal of torchvision's pairwise GIoU."""
    flat = [x.reshape(-1, 1, 4) for x in (preds, targets)]
    return torchvision.ops.generalized_box_iou(*flat).reshape(preds.shape[:-1])


def check(backend, function, theirs, preds, targets, tolerance):
    """Compare values and gradients with torchvision's in float64, which must be finite for the same elements."""
    skip_if_refused(BACKENDS, backend, (preds, targets, None), lambda: function(preds, targets, backend=backend))
    ours = [x.clone().requires_grad_() for x in (preds, targets)]
    exact = [x.double().requires_grad_() for x in (preds, targets)]
    out, reference = function(*ours, backend=backend), theirs(*exact)
    assert out.dtype == torch.promote_types(preds.dtype, torch.float32) and out.shape == reference.shape
    grad = torch.rand_like(out)
    found = (out, *torch.autograd.grad(out, ours, grad))
    wanted = (reference, *torch.autograd.grad(reference, exact, grad.double()))
    for name, x, y in zip(("giou", "d_preds", "d_targets"), found, wanted, strict=True):
        rounding = torch.finfo(x.dtype).eps if x.dtype.itemsize == 2 else 0.0
        assert torch.equal(x.isfinite(), y.isfinite()), name
        x, y = x.double().nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)
        torch.testing.assert_close(
            x, y, rtol=tolerance + rounding, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


# About twenty float32 operations on differences of areas below 150: 20 · 2⁻²⁴ of 4, the largest gradient.
TOLERANCE = 1e-5
PAIRS = {
    "metric": (generalized_box_iou, torchvision_giou),
    "loss": (generalized_box_iou_loss, torchvision.ops.generalized_box_iou_loss),
}


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", [(1024, 256), (7, 100003)], ids=str)
def test_giou__matches_torchvision_for_large_shapes(backend, pair, shape):
    check(backend, *PAIRS[pair], draw(shape, "cuda"), draw(shape, "cuda"), TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", PAIRS)
class TestEveryBackend:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_giou__matches_torchvision_for_each_shape(self, backend, device, pair, shape):
        check(backend, *PAIRS[pair], draw(shape, device), draw(shape, device), TOLERANCE)

    @pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4)], ids=str)
    def test_giou__accepts_any_leading_dimensions(self, backend, device, pair, shape):
        check(backend, *PAIRS[pair], draw(shape, device), draw(shape, device), TOLERANCE)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_giou__matches_torchvision_for_each_dtype(self, backend, device, pair, dtype):
        tolerance = 1e-12 if dtype == torch.float64 else TOLERANCE
        check(backend, *PAIRS[pair], draw((35, 9), device, dtype), draw((35, 9), device, dtype), tolerance)

    def test_giou__reads_any_strides(self, backend, device, pair):
        preds, targets = torch.rand(4, 20, 6, device=device), draw((20, 4), device).transpose(0, 1)
        check(backend, *PAIRS[pair], preds[..., 1:5].sort(-1).values[:, ::2], targets[:, ::2], TOLERANCE)

    def test_giou__matches_torchvision_for_degenerate_boxes(self, backend, device, pair):
        if pair == "metric":
            check(backend, *PAIRS[pair], *degenerate(device), TOLERANCE)
        else:
            # Denominators of 1e-7 give gradients of 1e7 and more; compare with float32's relative precision.
            ours = [x.requires_grad_() for x in degenerate(device)]
            theirs = [x.detach().clone().requires_grad_() for x in ours]
            reason = BACKENDS.unsupported(backend, *ours, 1e-7)
            if reason is not None:
                pytest.skip(reason)
            loss = generalized_box_iou_loss(*ours, backend=backend)
            reference = torchvision.ops.generalized_box_iou_loss(*theirs)
            torch.testing.assert_close(loss, reference, rtol=1e-6, atol=1e-6)
            grads = torch.autograd.grad(loss.sum(), ours), torch.autograd.grad(reference.sum(), theirs)
            torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)

    def test_giou__differentiates_one_argument(self, backend, device, pair):
        function, theirs = PAIRS[pair]
        for wanted in (0, 1):
            ours = [draw((33, 6), device) for _ in range(2)]
            if BACKENDS.unsupported(backend, *ours, None):
                pytest.skip("refused")
            exact = [x.double() for x in ours]
            ours[wanted].requires_grad_()
            exact[wanted].requires_grad_()
            (found,) = torch.autograd.grad(function(*ours, backend=backend).sum(), ours[wanted])
            (reference,) = torch.autograd.grad(theirs(*exact).sum(), exact[wanted])
            torch.testing.assert_close(found.double(), reference, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("backend, device", [("reference", "cpu"), ("triton", "cpu"), ("pallas_tpu", "cpu"), ON_GPU])
def test_giou__refuses_no_supported_call(backend, device):
    """The suite above skips what a backend refuses, so it must not refuse these."""
    pytest.importorskip({"triton": "triton", "pallas_tpu": "jax"}.get(backend, "torch"))
    for shape in [*SHAPES, (), (5,), (2, 3, 4)]:
        for dtype in (torch.float32, torch.bfloat16) if backend == "pallas_tpu" else HALVES_AND_FLOAT:
            boxes = draw(shape, device, dtype)
            if backend != "pallas_tpu" or boxes.numel():
                assert BACKENDS.unsupported(backend, boxes, boxes, None) is None
                assert BACKENDS.unsupported(backend, boxes, boxes, 1e-7) is None


@pytest.mark.parametrize("eps", [1e-7, 0.5])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_giou_loss__matches_torchvision_for_each_reduction(reduction, eps):
    preds, targets = draw((50,), "cpu"), draw((50,), "cpu")
    for x, y in ((preds, targets), (preds[0], targets[0]), (preds[:0], targets[:0])):
        theirs = torchvision.ops.generalized_box_iou_loss(x, y, reduction, eps)
        for ours in (
            generalized_box_iou_loss(x, y, reduction, eps, backend="triton"),
            GeneralizedBoxIoULoss(reduction, eps)(x, y),
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_giou__converts_integers_to_float32():
    preds, targets = draw((9,), "cpu") * 4, draw((9,), "cpu") * 4
    assert torch.equal(generalized_box_iou(preds.int(), targets.long()), generalized_box_iou(preds, targets))


@pytest.mark.parametrize("device", DEVICES)
def test_giou_loss__compiles_to_one_graph(device):
    torch._dynamo.reset()
    preds, targets = draw((4, 9), device).requires_grad_(), draw((4, 9), device)
    loss = GeneralizedBoxIoULoss("mean", backend="triton")

    def model(preds, targets):
        return loss(preds * 1.5, targets)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    grads = [torch.autograd.grad(function(preds, targets), preds)[0] for function in (model, compiled)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("device", DEVICES)
def test_giou__passes_opcheck(device):
    """Check schema, fake outputs and registered gradients."""
    pytest.importorskip("triton")
    preds, targets = draw((4, 9), device).requires_grad_(), draw((4, 9), device).requires_grad_()
    generalized_box_iou(preds, targets, backend="triton")  # registers it
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    for eps in (None, 1e-7):
        torch.library.opcheck(torch.ops.vitkernels.generalized_box_iou, (preds, targets, eps), test_utils=checks)


@pytest.mark.parametrize(
    "preds, targets, code, fields",
    [
        (torch.zeros(2, 4), torch.zeros(3, 4), "shape", {"preds": (2, 4), "targets": (3, 4)}),
        (torch.zeros(2, 5), torch.zeros(2, 5), "shape", {"preds": (2, 5)}),
        (torch.zeros(2, 4), torch.zeros(2, 4).double(), "dtype", {"targets": torch.float64}),
        (torch.zeros(2, 4), torch.zeros(2, 4, device="meta"), "device", {"argument": "targets", "device": "meta"}),
    ],
)
def test_generalized_box_iou__refuses_invalid_arguments(preds, targets, code, fields):
    with error(f"ops.generalized_box_iou.{code}", **fields):
        generalized_box_iou(preds, targets)


def test_generalized_box_iou_loss__refuses_an_unknown_reduction():
    for function in (
        partial(GeneralizedBoxIoULoss, "avg"),
        partial(generalized_box_iou_loss, *[torch.zeros(1, 4)] * 2, "avg"),
    ):
        with error("ops.generalized_box_iou.reduction", reduction="avg") as caught:
            function()
        assert str(caught.value).startswith("Invalid reduction")  # torchvision's tests match this


@pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))
@pytest.mark.parametrize("shape, dtype", [((40, 256), "float32"), ((40, 300), "bfloat16"), ((3, 37), "float32")])
def test_giou__compiles_for_v5e(shape, dtype):
    """Compile forward and backward by libtpu's compiler, without a TPU."""
    import jax

    from vitkernels.ops.generalized_box_iou.pallas_tpu_kernel import giou, giou_vjp

    boxes = [jax.ShapeDtypeStruct((*shape, 4), dtype)] * 2
    grad = jax.ShapeDtypeStruct(shape, "float32")
    compiler.compile_jax(partial(giou, eps=1e-7), boxes)
    compiler.compile_jax(lambda p, t, g: giou_vjp((p, t), (), (g,), eps=None), [*boxes, grad])
