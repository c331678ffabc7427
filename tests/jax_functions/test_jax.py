"""vitkernels.jax on the CPU, where Pallas interprets the kernels: values, gradients, transformations, a ViT in flax."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from expecting import error

pytest.importorskip("jax")

import jax
import jax.numpy as jnp

from vitkernels import jax as vk

ROOT = Path(__file__).resolve().parents[2]
# Both sides compute in float32 with full products; sums over tokens differ in order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def quick_compilation():
    """As quick_kernels, for programs that JAX itself compiles: without XLA's optimizations for the CPU."""
    was = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", was)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def qkv(tokens: int = 37, batch: int = 2) -> list[jax.Array]:
    return [normal(n, batch, tokens, 2, 16) for n in range(3)]


def assert_same(function, reference, *arrays, argnums=(0, 1, 2)) -> None:
    """Compare values, and the gradients of a sum of squares."""
    np.testing.assert_allclose(function(*arrays), reference(*arrays), **CLOSE)

    def gradients(f):
        return jax.jit(jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums))(*arrays)

    for mine, theirs in zip(gradients(function), gradients(reference), strict=True):
        np.testing.assert_allclose(mine, theirs, **CLOSE)


@pytest.mark.parametrize("tokens", [5, 197])
def test_attention__matches_jax(tokens):
    assert_same(vk.attention, jax.nn.dot_product_attention, *qkv(tokens))


@pytest.mark.slow
def test_attention__bias_mask_and_causal():
    bias, mask = normal(3, 1, 2, 37, 37), jax.random.bernoulli(jax.random.key(4), 0.7, (2, 1, 37, 37))
    mask = mask | jnp.eye(37, dtype=bool)  # each query has a key
    assert_same(
        lambda q, k, v, bias: vk.attention(q, k, v, bias=bias, mask=mask, scale=0.3),
        lambda q, k, v, bias: jax.nn.dot_product_attention(q, k, v, bias=bias, mask=mask, scale=0.3),
        *qkv(), bias, argnums=(0, 1, 2, 3),
    )  # fmt: skip
    np.testing.assert_allclose(
        vk.attention(*qkv(), is_causal=True), jax.nn.dot_product_attention(*qkv(), is_causal=True), **CLOSE
    )


def test_attention__segments_match_a_mask():
    ids = jnp.asarray([[0] * 20 + [1] * 17, [0] * 5 + [1] * 32])
    mask = (ids[:, None, :, None] == ids[:, None, None, :])  # fmt: skip
    expected = jax.nn.dot_product_attention(*qkv(), mask=mask)
    np.testing.assert_allclose(vk.attention(*qkv(), segment_ids=ids), expected, **CLOSE)


def test_attention_qkvpacked__matches_separate_arrays():
    packed = jnp.stack(qkv(), axis=2)
    assert_same(
        vk.attention_qkvpacked, lambda x: jax.nn.dot_product_attention(*jnp.moveaxis(x, 2, 0)), packed, argnums=(0,)
    )


def test_attention__bfloat16():
    arrays = [x.astype(jnp.bfloat16) for x in qkv()]
    out = vk.attention(*arrays)
    assert out.dtype == jnp.bfloat16
    expected = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(out.astype(jnp.float32), expected, atol=2e-2)  # 2 bits above bfloat16's rounding


def test_vmap__adds_an_axis():
    arrays = [jnp.stack([x, 2 * x]) for x in qkv()]
    expected = jnp.stack([vk.attention(*(x[n] for x in arrays)) for n in range(2)])
    np.testing.assert_allclose(jax.vmap(vk.attention)(*arrays), expected, **CLOSE)


@pytest.mark.parametrize("approximate", [False, True])
def test_linear_gelu__matches_jax(approximate):
    jax.config.update("jax_disable_most_optimizations", False)  # without them, tanh is less accurate
    assert_same(
        lambda x, w, b: vk.linear_gelu(x, w, b, approximate=approximate),
        lambda x, w, b: jax.nn.gelu(x @ w.T + b, approximate=approximate),
        normal(0, 2, 17, 24), normal(1, 40, 24), normal(2, 40),
    )  # fmt: skip


def test_linear_gelu__without_bias():
    x, w = normal(0, 9, 24), normal(1, 40, 24)
    np.testing.assert_allclose(vk.linear_gelu(x, w), jax.nn.gelu(x @ w.T, approximate=False), **CLOSE)


def norm_reference(x, branch, weight, bias, branch_bias=None, layer_scale=None, sample_scale=None):
    branch = 0.0 if branch is None else branch
    branch = branch if branch_bias is None else branch + branch_bias
    branch = branch if layer_scale is None else branch * layer_scale
    total = x + (branch if sample_scale is None else branch * sample_scale[:, None, None])
    centred = total - total.mean(-1, keepdims=True)
    normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight + bias
    return total, normed


@pytest.mark.parametrize("names", [(), ("branch_bias",), ("branch_bias", "layer_scale", "sample_scale")], ids=len)
def test_layer_norm_residual__matches_jax(names):
    extras = {"branch_bias": normal(4, 40), "layer_scale": normal(5, 40), "sample_scale": jnp.array([0.0, 2.0, 2.0])}
    extras = {name: extras[name] for name in names}
    suffixed = {"branch_bias": "branch_bias_C", "layer_scale": "layer_scale_C", "sample_scale": "sample_scale_B"}

    def mine(*arrays):
        given = {suffixed[name]: x for name, x in zip(names, arrays[4:], strict=True)}
        return jnp.stack(vk.layer_norm_residual(*arrays[:4], **given))

    def reference(*arrays):
        return jnp.stack(norm_reference(*arrays[:4], **dict(zip(names, arrays[4:], strict=True))))

    arrays = normal(0, 3, 19, 40), normal(1, 3, 19, 40), normal(2, 40), normal(3, 40), *extras.values()
    assert_same(mine, reference, *arrays, argnums=tuple(range(4 + len(names) - ("sample_scale" in names))))


def test_layer_norm_residual__without_a_branch_under_vmap_and_in_bfloat16():
    x, weight, bias = normal(0, 2, 3, 19, 40), normal(2, 40), normal(3, 40)
    total, normed = jax.vmap(lambda x: vk.layer_norm_residual(x, None, weight, bias, dtype=jnp.bfloat16))(x)
    np.testing.assert_array_equal(total, x)
    assert normed.dtype == jnp.bfloat16
    expected = norm_reference(x, None, weight, bias)[1]
    np.testing.assert_allclose(normed.astype(jnp.float32), expected, rtol=1e-2, atol=1e-2)  # 2 bits above the rounding


def test_eight_bit_linear__is_within_two_roundings():
    x, w, b = normal(0, 2, 3, 37, 48), normal(1, 32, 48), normal(2, 32)

    def gradients(f):
        over_images = jax.vmap(jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)), in_axes=(0, None, None))
        return jax.jit(over_images)(x, w, b)

    pairs = [(vk.eight_bit_linear(x[0], w, b), x[0] @ w.T + b)]
    pairs += zip(gradients(vk.eight_bit_linear), gradients(lambda x, w, b: x @ w.T + b), strict=True)
    for mine, theirs in pairs:
        # 0.7 % for each of up to three factors that are rounded one after the other (tests/ops/test_eight_bit_linear)
        assert jnp.linalg.norm(mine - theirs) < 0.02 * jnp.linalg.norm(theirs)


def test_int8_matmul__is_exact():
    x, w = (jax.random.randint(jax.random.key(n), s, -127, 128, jnp.int8) for n, s in enumerate([(33, 70), (70, 19)]))
    expected = np.asarray(x, np.int32) @ np.asarray(w, np.int32)
    np.testing.assert_array_equal(jax.jit(vk.int8_matmul)(x, w), expected)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: vk.attention(*[x[0] for x in qkv()]), "jax.attention"),
        (lambda: vk.attention(*[x[..., :12] for x in qkv()]), "jax.attention"),
        (lambda: vk.attention(*[x.astype(jnp.float16) for x in qkv()]), "jax.attention"),
        (lambda: vk.attention_qkvpacked(normal(0, 2, 5, 2, 2, 16)), "jax.attention"),
        (lambda: vk.linear_gelu(normal(0, 3, 4), normal(1, 5, 6)), "jax.linear_gelu"),
        (lambda: vk.linear_gelu(normal(0, 3, 4).astype(jnp.float16), normal(1, 5, 4)), "jax.linear_gelu"),
        (lambda: vk.layer_norm_residual(normal(0, 2, 4), None, *[normal(1, 5)] * 2), "jax.layer_norm_residual"),
        (
            lambda: vk.layer_norm_residual(normal(0, 2, 4), None, *[normal(1, 4)] * 2, layer_scale_C=normal(1, 4)),
            "jax.layer_norm_residual",
        ),
        (lambda: vk.layer_norm_residual(*[normal(0, 2, 4)] * 2, *[jnp.ones(4, int)] * 2), "jax.layer_norm_residual"),
        (lambda: vk.eight_bit_linear(normal(0, 3, 4), normal(1, 5, 6)), "jax.eight_bit_linear"),
        (lambda: vk.eight_bit_linear(jnp.ones((3, 4), int), normal(1, 5, 4)), "jax.eight_bit_linear"),
        (lambda: vk.int8_matmul(normal(0, 3, 4), normal(1, 4, 5)), "jax.int8_matmul"),
        (lambda: vk.int8_matmul(jnp.ones((3, 4), jnp.int8), jnp.ones((5, 4), jnp.int8)), "jax.int8_matmul"),
    ],
)
def test_errors__name_the_operation(call, code):
    with error(code):
        call()


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from vitkernels import jax as vk
mesh = jax.make_mesh((2,), ("data",))
q, k, v = (jax.random.normal(jax.random.key(n), (4, 21, 2, 16)) for n in range(3))
loss = lambda attend: lambda *x: (attend(*x) ** 2).sum()
for sharded in (
    jax.shard_map(vk.attention, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False),
):
    np.testing.assert_allclose(jax.jit(sharded)(q, k, v), jax.nn.dot_product_attention(q, k, v), atol=1e-5)
    mine, theirs = (jax.jit(jax.grad(loss(f)))(q, k, v) for f in (sharded, jax.nn.dot_product_attention))
    np.testing.assert_allclose(mine, theirs, atol=1e-4)
for f in (lambda x, w, b: vk.layer_norm_residual(x, x, w[0], b)[1], vk.linear_gelu, vk.eight_bit_linear):
    arrays = q.reshape(4, 21, 32), jax.random.normal(jax.random.key(4), (32, 32)), jnp.ones(32)
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=False)
    mine, theirs = (jax.jit(jax.grad(lambda *x: (g(*x) ** 2).sum(), (0, 1)))(*arrays) for g in (sharded, f))
    for a, b in zip(mine, theirs):
        assert jnp.linalg.norm(a - b) < 0.01 * jnp.linalg.norm(b)  # int8 rounds columns of a shard with its own scale
print(len(jax.devices()), "devices")
"""


@pytest.mark.slow
def test_shard_map__each_device_attends_to_its_images():
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    flags["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # as quick_compilation
    done = subprocess.run([sys.executable, "-c", SHARDED], env=os.environ | flags, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "2 devices\n"


def test_import__leaves_jax_its_platforms():
    program = "import jax; from vitkernels import jax as vk; print(jax.config.jax_platforms)"
    environment = {name: x for name, x in os.environ.items() if name != "JAX_PLATFORMS"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "None\n", done.stderr[-3000:]


@pytest.mark.slow
def test_flax_vit__trains_to_the_same_losses():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, width: int, heads: int, with_kernels: bool, rngs):
            self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
            self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
            self.out = nnx.Linear(width, width, rngs=rngs)
            self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
            self.heads, self.with_kernels = heads, with_kernels

        def __call__(self, x):
            B, N, E = x.shape
            qkv = self.qkv(self.norms[0](x)).reshape(B, N, 3, self.heads, E // self.heads)
            if self.with_kernels:
                attended = vk.attention_qkvpacked(qkv)
            else:
                attended = jax.nn.dot_product_attention(*jnp.moveaxis(qkv, 2, 0))
            attended, norm = self.out(attended.reshape(B, N, E)), self.norms[1]
            if self.with_kernels:
                x, y = vk.layer_norm_residual(x, attended, norm.scale[...], norm.bias[...])
                y = vk.linear_gelu(y, self.up.kernel[...].T, self.up.bias[...])
            else:
                x = x + attended
                y = jax.nn.gelu(self.up(norm(x)), approximate=False)
            return x + self.down(y)

    class Vit(nnx.Module):
        def __init__(self, with_kernels: bool):
            rngs = nnx.Rngs(0)
            self.embed = nnx.Conv(3, 32, (4, 4), 4, rngs=rngs)
            self.token = nnx.Param(jnp.zeros((1, 1, 32)))
            self.blocks = nnx.List([Block(32, 2, with_kernels, rngs) for _ in range(2)])
            self.head = nnx.Linear(32, 10, rngs=rngs)

        def __call__(self, images):
            x = self.embed(images).reshape(images.shape[0], -1, 32)
            x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(x), 1, 32)), x], axis=1)
            for block in self.blocks:
                x = block(x)
            return self.head(x[:, 0])

    def losses(model) -> list[float]:
        images, labels = normal(0, 8, 16, 16, 3), jnp.arange(8)

        @nnx.jit
        def step(model):
            def loss(model):
                return -jax.nn.log_softmax(model(images))[jnp.arange(8), labels].mean()

            value, gradients = nnx.value_and_grad(loss)(model)
            state = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - 0.01 * g, state, nnx.state(gradients, nnx.Param)))
            return value

        return [float(step(model)) for _ in range(3)]

    mine, plain = losses(Vit(with_kernels=True)), losses(Vit(with_kernels=False))
    np.testing.assert_allclose(mine, plain, rtol=1e-5)
    assert plain[-1] < plain[0]  # it learns
