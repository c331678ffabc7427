"""Conformance suite of norm_linear and norm_mlp: every backend against float64, with all gradients."""

import pytest
import torch
from expecting import error
from torch.nn import functional as F

pytest.importorskip("jax")

from vitkernels.ops import norm_linear, norm_mlp, tpu_rows
from vitkernels.ops.norm_linear import BACKENDS

# float32: sums of up to a few hundred products. bfloat16: the sum, its norm, the hidden activation and every gradient
# between products are rounded once each.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1e-2}
EXTRAS = ("branch", "branch_bias_C", "layer_scale_C", "sample_scale_B")
SHAPES = [(3, 5, 24), (2, 19, 96)]  # images, tokens, channels: fewer than a register, and no multiples of its sides


def draw(op, shape, hidden=56, x_dtype=torch.float32, out=torch.float32, extras=EXTRAS):
    """Return the arguments of a call; a vector's dtype is float32, as that of a parameter under autocast."""
    B, _, C = shape
    given = {
        "x": (3 * torch.randn(shape) + 1).to(x_dtype),
        "branch": torch.randn(shape).to(out),
        "norm_weight_C": torch.randn(C),
        "norm_bias_C": torch.randn(C),
        "branch_bias_C": torch.randn(C),
        "layer_scale_C": torch.randn(C),
        "sample_scale_B": torch.randint(0, 2, (B,)) / 0.75,
    }
    if op is norm_linear:
        given |= {"weight_FC": torch.randn(hidden + 1, C) * C**-0.5, "bias_F": torch.randn(hidden + 1)}
    else:
        given |= {
            "weight1_FC": torch.randn(hidden, C) * C**-0.5,
            "bias1_F": torch.randn(hidden),
            "weight2_OF": torch.randn(C + 3, hidden) * hidden**-0.5,
        }
    kept = {name: x for name, x in given.items() if name not in EXTRAS or name in extras}
    return {"branch": None} | kept


def exact(op, approximate="none", *, x, branch, norm_weight_C, norm_bias_C, eps=1e-6, branch_bias_C=None,
          layer_scale_C=None, sample_scale_B=None, **products):  # fmt: skip
    """Compute the op in float64, independently of the package."""
    total = x
    if branch is not None:
        added = branch if branch_bias_C is None else branch + branch_bias_C
        added = added if layer_scale_C is None else added * layer_scale_C
        total = x + (added if sample_scale_B is None else added * sample_scale_B[:, None, None])
    centred = total - total.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * norm_weight_C + norm_bias_C
    if op is norm_linear:
        return total, F.linear(normed, products["weight_FC"], products["bias_F"])
    hidden = F.gelu(F.linear(normed, products["weight1_FC"], products["bias1_F"]), approximate=approximate)
    return total, F.linear(hidden, products["weight2_OF"])


def results(call, given, dtotal, dy):
    leaves = {k: None if v is None else v.detach().clone() for k, v in given.items()}
    wanted = {k: v.requires_grad_() for k, v in leaves.items() if v is not None and k != "sample_scale_B"}
    total, y = call(**leaves)
    grads = torch.autograd.grad([total, y], [*wanted.values()], [dtotal.to(total), dy.to(y)])
    return {"total": total.detach(), "y": y.detach(), **dict(zip(wanted, grads, strict=True))}


def check(op, backend, given, out=torch.float32, approximate="none", **settings):
    keywords = {} if op is norm_linear else {"approximate": approximate}

    def call(**leaves):
        with torch.autocast("cpu", torch.bfloat16, enabled=out == torch.bfloat16):
            return op(**leaves, **keywords, **settings, backend=backend)

    with torch.no_grad():
        total, y = call(**given)
    dtotal, dy = torch.randn(total.shape), torch.randn(y.shape).to(out)
    got = results(call, given, dtotal.to(total.dtype), dy)
    # Kernels multiply by weights rounded to the product's dtype, so the exact values do too.
    rounded = {k: v.to(out) if k.startswith("weight") else v for k, v in given.items() if v is not None}
    wide = {"branch": None} | {k: v.double() for k, v in rounded.items()}
    want = results(lambda **leaves: exact(op, approximate, **leaves), wide, dtotal.to(total.dtype), dy)
    for name, tensor in want.items():
        error = (got[name].double() - tensor).norm() / tensor.norm().clamp_min(1e-300)
        assert error < TOLERANCE[out if given["x"].dtype == torch.float32 else torch.bfloat16], (name, float(error))
    for name, x in given.items():
        assert name not in got or name in ("total", "y") or got[name].dtype == x.dtype, name
    return got


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_norm_products__match_float64(backend, op, shape, out):
    torch.manual_seed(sum(shape))
    check(op, backend, draw(op, shape, out=out), out)


@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
def test_norm_products__match_float64_if_an_image_takes_several_blocks(op, monkeypatch):
    monkeypatch.setattr(tpu_rows, "_ROWS", 32)
    torch.manual_seed(0)
    blocks = tpu_rows.RowBlocks.of(2, 71, 1000)
    assert blocks.grid == (2, 3) and blocks.rows * 3 > 71
    check(op, "pallas_tpu", draw(op, (2, 71, 8)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 197, 40), (1, 577, 8), (4, 256, 16)], ids=str)
@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
def test_norm_products__match_float64_at_the_lengths_of_vits(op, shape):
    torch.manual_seed(0)
    check(op, "pallas_tpu", draw(op, shape, out=torch.bfloat16), torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
@pytest.mark.parametrize("extras", [(), ("branch",), ("branch", "sample_scale_B")], ids=len)
def test_norm_products__match_float64_without_some_operands(backend, op, extras):
    torch.manual_seed(0)
    check(op, backend, draw(op, (3, 21, 48), extras=extras))


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
def test_norm_products__match_float64_with_a_bfloat16_stream(backend, op):
    torch.manual_seed(0)
    given = draw(op, (3, 21, 48), x_dtype=torch.bfloat16, out=torch.bfloat16)
    assert check(op, backend, given, torch.bfloat16)["total"].dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("keep", [False, True], ids=["recomputed", "kept"])
def test_norm_mlp__matches_float64_for_each_gelu(backend, approximate, keep):
    torch.manual_seed(0)
    given = draw(norm_mlp, (2, 13, 40), hidden=300)
    check(norm_mlp, backend, given, approximate=approximate, keep_activation=keep)
    given = draw(norm_mlp, (2, 13, 40), hidden=300, out=torch.bfloat16)
    check(norm_mlp, backend, given, torch.bfloat16, approximate=approximate, keep_activation=keep)


def test_norm_mlp__saves_the_branch_instead_of_the_sum():
    """x is saved by the op that computed it, so a layer keeps one float32 stream, not two."""
    torch.manual_seed(0)
    given = draw(norm_mlp, (2, 5, 16), out=torch.bfloat16)
    leaves = {k: v.requires_grad_(k not in ("branch", "sample_scale_B")) for k, v in given.items()}
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        total, _ = norm_mlp(**leaves, backend="pallas_tpu")
    streams = {x.data_ptr() for x in kept if x.shape == total.shape}
    assert streams == {given["x"].data_ptr(), given["branch"].data_ptr()}


@pytest.mark.parametrize("tokens, rounded", [(9, False), (16, True), (8, True)])
@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
def test_norm_products__keep_a_rounded_weight_only_if_xla_multiplies_by_it(op, tokens, rounded):
    torch.manual_seed(0)
    given = draw(op, (2, tokens, 16), out=torch.bfloat16)
    leaves = {k: v.requires_grad_(k not in ("branch", "sample_scale_B")) for k, v in given.items()}
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        op(**leaves, backend="pallas_tpu")
    weights = {k: v for k, v in given.items() if k.startswith("weight")}
    for name, weight in weights.items():
        found = [x for x in kept if x.shape == (1, *weight.shape)]
        assert [x.dtype for x in found] == [torch.bfloat16 if rounded else torch.float32], name
        assert rounded or found[0].data_ptr() == weight.data_ptr(), name


def test_row_blocks__pad_images_to_8_rows_and_join_them():
    blocks = tpu_rows.RowBlocks.of(64, 197, 1000)
    assert (blocks.images, blocks.rows, blocks.height, blocks.grid) == (2, 200, 400, (32, 1))
    assert blocks.pieces() == [slice(0, 208), slice(208, 400)]  # the first takes 8 rows of the second image
    alone = tpu_rows.RowBlocks.of(7, 197, 1000)
    assert (alone.images, alone.height) == (1, 200)


@pytest.mark.parametrize("backend", BACKENDS.names())
def test_norm_linear__returns_zero_gradient_for_the_keys_bias(backend):
    torch.manual_seed(0)
    given = draw(norm_linear, (2, 9, 16), hidden=23)
    got = check_qkv(given, backend)
    queries, keys, values = got["bias_F"].chunk(3)
    assert queries.abs().min() > 0 and values.abs().min() > 0
    if backend != "reference":
        assert not keys.any()


def check_qkv(given, backend):
    dy = torch.randn(2, 9, 24)
    return results(
        lambda **leaves: norm_linear(**leaves, is_qkv=True, backend=backend), given, torch.randn(2, 9, 16), dy
    )


@pytest.mark.parametrize("backend", BACKENDS.names())
@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
def test_norm_products__differentiate_one_output_and_only_what_is_required(backend, op):
    torch.manual_seed(0)
    given = draw(op, (2, 9, 16))
    for index in (0, 1):
        leaves = {k: v.clone().requires_grad_(k in ("branch", "x")) for k, v in given.items()}
        op(**leaves, backend=backend)[index].square().sum().backward()
        wide = {k: v.double().requires_grad_(k in ("branch", "x")) for k, v in given.items()}
        exact(op, **wide)[index].square().sum().backward()
        for name in ("branch", "x"):
            difference = (leaves[name].grad - wide[name].grad).norm() / wide[name].grad.norm()
            assert difference < TOLERANCE[torch.float32], (index, name)


@pytest.mark.parametrize("op", [norm_linear, norm_mlp], ids=["linear", "mlp"])
def test_norm_products__refuse_invalid_arguments(op):
    given = draw(op, (2, 9, 16))
    with error("ops.layer_norm_residual.shape", argument="branch"):
        op(**given | {"branch": torch.zeros(2, 9, 15)})
    weight = "weight_FC" if op is norm_linear else "weight1_FC"
    with error("ops.linear.shape"):
        op(**given | {weight: torch.zeros(56, 15)})
    with error("registry.unsupported", backend="pallas_tpu"):
        op(**{k: v.double() for k, v in given.items()}, backend="pallas_tpu")


def test_norm_linear__refuses_weights_that_exceed_vmem():
    args = draw(norm_linear, (1, 2, 4096), hidden=4095)
    norm = tuple(args.get(k) for k in ("x", "branch", "norm_weight_C", "norm_bias_C", *EXTRAS[1:]))
    reason = BACKENDS.unsupported("pallas_tpu", norm, args["weight_FC"], None, 1e-6, False, torch.float32)
    assert "64 MiB" in reason and "24 MiB" in reason
