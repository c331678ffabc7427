"""Conformance suite of layer_norm_residual: every backend against float64, with all gradients."""

from functools import partial

import pytest
import torch
from backend_devices import each_backend_and_device
from expecting import error

from vitkernels.ops import layer_norm_residual
from vitkernels.ops.layer_norm_residual import BACKENDS

NAMES = ("branch_bias_C", "layer_scale_C")


def make(device, shape, x_dtype, branch_dtype, extras):
    """Return x, branch, weight, bias and the extras; x is far from zero mean and unit variance, so that both matter."""
    B, C = shape[0], shape[-1]
    draw = {
        "x": 3 * torch.randn(shape) + 1,
        "branch": torch.randn(shape),
        "weight_C": torch.randn(C),
        "bias_C": torch.randn(C),
        "branch_bias_C": torch.randn(C),
        "layer_scale_C": torch.randn(C),
        "sample_scale_B": torch.randint(0, 2, (B,)) / 0.75,
    }
    dtypes = {"x": x_dtype, "branch": branch_dtype}
    kept = {"x", "branch", "weight_C", "bias_C", *extras}
    return {k: v.to(device, dtypes.get(k, torch.float32)) for k, v in draw.items() if k in kept}


def outputs_and_gradients(call, tensors, d_total, d_normed):
    leaves = {k: v.detach().clone().requires_grad_(k != "sample_scale_B") for k, v in tensors.items()}
    total, normed = call(**leaves)
    wanted = {k: v for k, v in leaves.items() if v.requires_grad}
    grads = torch.autograd.grad([total, normed], [*wanted.values()], [d_total.to(total), d_normed.to(normed)])
    return {"total": total.detach(), "normed": normed.detach(), **dict(zip(wanted, grads, strict=True))}


def exact(x, branch, weight_C, bias_C, branch_bias_C=None, layer_scale_C=None, sample_scale_B=None, eps=1e-6):
    """Compute the op in float64, independently of the package."""
    added = branch if branch_bias_C is None else branch + branch_bias_C
    added = added if layer_scale_C is None else added * layer_scale_C
    if sample_scale_B is not None:
        added = torch.stack([a * s for a, s in zip(added, sample_scale_B, strict=True)])
    total = x + added
    centred = total - total.mean(-1, keepdim=True)
    return total, centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight_C + bias_C


def relative_error(got, want):
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-300))


# float32 sums of C terms have a relative error of about 1e-6. bfloat16 rounds by 0.17 % on average, up to three times
# here: the sum, its norm, and the gradient.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3, torch.float16: 6e-4}


@each_backend_and_device(BACKENDS)
@pytest.mark.parametrize("shape", [(2, 5, 96), (3, 768), (1, 3, 2, 200), (2, 1, 24), (2, 7, 1024)], ids=str)
@pytest.mark.parametrize(
    "extras",
    [
        (),
        *(pytest.param(some, marks=pytest.mark.slow) for some in (NAMES, ("sample_scale_B",))),
        (*NAMES, "sample_scale_B"),
    ],
    ids=len,
)
@pytest.mark.parametrize(
    "x_dtype,branch_dtype",
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_layer_norm_residual__matches_float64(device, backend, shape, extras, x_dtype, branch_dtype):
    check(device, backend, shape, extras, x_dtype, branch_dtype)


@each_backend_and_device(BACKENDS)
@pytest.mark.parametrize("shape, eps", [((2, 5, 96), 1e-2), ((6, 67, 24), 1e-6)], ids=["eps", "many rows"])
def test_layer_norm_residual__matches_float64_for_another_eps_and_many_rows(device, backend, shape, eps):
    check(device, backend, shape, (*NAMES, "sample_scale_B"), torch.float32, torch.float32, eps=eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norm_residual__with_the_longest_rows_on_gpu(dtype):
    """In bfloat16, three stages of the backward pass would need 262 KB of shared memory; Hopper has 227."""
    check("cuda", "triton", (2, 100, 8192), (*NAMES, "sample_scale_B"), dtype, dtype)


def check(device, name, shape, extras, x_dtype, branch_dtype, **settings):
    torch.manual_seed(hash((shape, len(extras))) % 2**31)
    tensors = make(device, shape, x_dtype, branch_dtype, extras)
    d_total, d_normed = (torch.randn(shape, device=device).to(x_dtype) for _ in range(2))
    wide = {k: v.double() for k, v in tensors.items()}
    got = outputs_and_gradients(partial(layer_norm_residual, backend=name, **settings), tensors, d_total, d_normed)
    want = outputs_and_gradients(partial(exact, **settings), wide, d_total, d_normed)
    for what, tensor in want.items():
        # The norm of a sum that was rounded to x's dtype inherits that rounding.
        dtype = torch.bfloat16 if torch.bfloat16 in (got[what].dtype, x_dtype) else torch.float32
        assert relative_error(got[what], tensor) < TOLERANCE[dtype], what


@pytest.mark.parametrize("name", BACKENDS.names())
def test_layer_norm_residual__normalizes_x_without_a_branch(name):
    torch.manual_seed(0)
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.float32, ())
    del tensors["branch"]
    gradient = torch.randn(2, 5, 96)
    got = outputs_and_gradients(
        lambda x, weight_C, bias_C: layer_norm_residual(x, None, weight_C, bias_C, backend=name),
        tensors, gradient, gradient,
    )  # fmt: skip
    want = outputs_and_gradients(
        lambda x, weight_C, bias_C: exact(x, torch.zeros_like(x), weight_C, bias_C),
        {k: v.double() for k, v in tensors.items()}, gradient, gradient,
    )  # fmt: skip
    for what, tensor in want.items():
        assert relative_error(got[what], tensor) < TOLERANCE[torch.float32], what


@pytest.mark.parametrize("name", BACKENDS.names())
def test_layer_norm_residual__differentiates_one_output(name):
    torch.manual_seed(0)
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.float32, NAMES)
    for index in (0, 1):
        leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
        layer_norm_residual(**leaves, backend=name)[index].square().sum().backward()
        wide = {k: v.double().requires_grad_() for k, v in tensors.items()}
        exact(**wide)[index].square().sum().backward()
        for key in ("x", "branch", *NAMES):
            assert relative_error(leaves[key].grad, wide[key].grad) < TOLERANCE[torch.float32], (index, key)


@pytest.mark.parametrize("name", BACKENDS.names())
@pytest.mark.parametrize("wanted", [("weight_C", "bias_C"), ("branch",), *((k,) for k in NAMES)], ids="+".join)
def test_layer_norm_residual__computes_only_the_required_gradients(name, wanted):
    """As for a model whose first layers are frozen, so that x needs no gradient."""
    torch.manual_seed(0)
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.float32, (*NAMES, "sample_scale_B"))
    d_normed = torch.randn(2, 5, 96)

    def gradients(call, tensors):
        leaves = {k: v.clone().requires_grad_(k in wanted) for k, v in tensors.items()}
        return torch.autograd.grad(call(**leaves)[1], [leaves[k] for k in wanted], d_normed.to(leaves["x"]))

    got = gradients(partial(layer_norm_residual, backend=name), tensors)
    want = gradients(exact, {k: v.double() for k, v in tensors.items()})
    for what, ours, theirs in zip(wanted, got, want, strict=True):
        assert relative_error(ours, theirs) < TOLERANCE[torch.float32], what


@pytest.mark.parametrize("name", BACKENDS.names())
def test_layer_norm_residual__accepts_an_empty_batch(name):
    tensors = make("cpu", (0, 5, 96), torch.float32, torch.float32, (*NAMES, "sample_scale_B"))
    leaves = {k: v.requires_grad_(k != "sample_scale_B") for k, v in tensors.items()}
    total, normed = layer_norm_residual(**leaves, backend=name)
    assert total.shape == normed.shape == (0, 5, 96)
    (total + normed).sum().backward()
    assert leaves["weight_C"].grad.abs().sum() == 0


@pytest.mark.parametrize("name", BACKENDS.names())
def test_layer_norm_residual__returns_the_norm_in_autocasts_dtype(name):
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.bfloat16, NAMES)
    with torch.autocast("cpu", torch.bfloat16):
        total, normed = layer_norm_residual(**tensors, backend=name)
    assert total.dtype == torch.float32 and normed.dtype == torch.bfloat16
    total, normed = layer_norm_residual(**tensors, backend=name)
    assert normed.dtype == torch.float32


def test_layer_norm_residual__is_bitwise_reproducible():
    tensors = make("cpu", (3, 50, 96), torch.float32, torch.float32, NAMES)
    runs = [
        outputs_and_gradients(
            lambda **t: layer_norm_residual(**t, backend="triton"),
            tensors,
            torch.ones(3, 50, 96),
            torch.ones(3, 50, 96),
        )
        for _ in range(2)
    ]
    assert all(torch.equal(runs[0][k], runs[1][k]) for k in runs[0])


def test_layer_norm_residual__compiles_to_one_graph():
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.float32, NAMES)
    gradient = torch.randn(2, 5, 96)
    call = partial(layer_norm_residual, backend="triton")
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got, want = (outputs_and_gradients(f, tensors, gradient, gradient) for f in (compiled, call))
    assert all(torch.equal(got[k], want[k]) for k in want)
    opcheck_args = (*(tensors[k] for k in ("x", "branch", "weight_C", "bias_C")), 1e-6, *(tensors[k] for k in NAMES))
    torch.library.opcheck(torch.ops.vitkernels.add_layer_norm.default, (*opcheck_args, None, torch.float32))


@pytest.mark.parametrize(
    "change, code, fields",
    [
        ({"branch": torch.zeros(2, 5, 95)}, "shape", {"argument": "branch", "expected": (2, 5, 96)}),
        ({"weight_C": torch.zeros(95)}, "shape", {"argument": "weight", "expected": (96,)}),
        ({"sample_scale_B": torch.zeros(5)}, "shape", {"argument": "sample_scale", "expected": (2,)}),
        ({"bias_C": torch.zeros(96, dtype=torch.int32)}, "dtype", {"argument": "bias"}),
        ({"bias_C": torch.zeros(96, device="meta")}, "device", {"argument": "bias", "device": "meta"}),
        ({"bias_C": None}, "type", {"argument": "bias", "type": "NoneType"}),
        ({"branch": None}, "no_branch", {}),
        ({"x": torch.zeros(2, 5, 96, dtype=torch.int32)}, "dtype", {"argument": "x"}),
        ({"x": torch.zeros(2, 5, 0)}, "shape", {"argument": "x", "shape": (2, 5, 0)}),
        ({"x": torch.tensor(1.0)}, "shape", {"argument": "x", "shape": ()}),
    ],
)  # fmt: skip
def test_layer_norm_residual__refuses_invalid_arguments(change, code, fields):
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.float32, NAMES)
    with error(f"ops.layer_norm_residual.{code}", **fields):
        layer_norm_residual(**{**tensors, **change})


def test_layer_norm_residual__refuses_backends():
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.float32, NAMES)
    with error("unknown_name", name="tritn", near=["triton"]):
        layer_norm_residual(**tensors, backend="tritn")
    with error("registry.unsupported", backend="triton"):
        layer_norm_residual(**tensors | {"x": torch.zeros(2, 5, 96).double()}, backend="triton")


def test_layer_norm_residual__message_of_a_refusal():
    tensors = make("cpu", (2, 5, 96), torch.float32, torch.float32, NAMES)
    with error("ops.layer_norm_residual.shape") as caught:
        layer_norm_residual(**tensors | {"branch": torch.zeros(2, 5, 95)})
    assert str(caught.value) == "branch must have shape (2, 5, 96), got (2, 5, 95)"
    with error("registry.unsupported") as caught:
        layer_norm_residual(**tensors | {"x": torch.zeros(2, 5, 96).double()}, backend="triton")
    assert str(caught.value).endswith(
        "supports float32, bfloat16 and float16, got torch.float64. Use backend='reference'"
    )
