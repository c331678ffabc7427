"""pallas_op on CPU tensors, with the quickstart's kernels."""

import functools
import gc
import os
from pathlib import Path

import pytest
import torch
from expecting import error

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from vitkernels.bridge import cuda_context, jax_compat, pallas_devices, pallas_op
from vitkernels.bridge.examples import quickstart
from vitkernels.bridge.examples.quickstart import add_vectors, iota, matmul
from vitkernels.bridge.pallas_devices import Trace

# Float32 products here sum at most 128 terms of size about 1: each rounding is 6e-8 of a partial sum of about 11.
F32 = {"atol": 5e-5, "rtol": 1e-5}


def test_add_vectors__equals_torch():
    x, y = torch.randn(8, 128), torch.randn(8, 128)
    torch.testing.assert_close(add_vectors(x, y), x + y, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_dtypes__are_preserved(dtype):
    x = torch.randint(0, 2, (8, 128)).to(dtype)
    copy = pallas_op(lambda x: x[::-1], name="flip_rows")
    torch.testing.assert_close(copy(x), x.flip(0), rtol=0, atol=0)


@pytest.mark.parametrize("length", [1, 8, 128, 300])
def test_iota__needs_no_tensor(length):
    assert iota(length=length).tolist() == list(range(length))
    assert iota(length=length, device="cpu").dtype == torch.int32


def test_matmul__in_blocks():
    x, y = torch.randn(64, 128), torch.randn(128, 96)
    torch.testing.assert_close(matmul(x, y, block=(32, 32, 64)), x @ y, **F32)


@pytest.mark.parametrize("activation", quickstart.ACTIVATIONS)
def test_matmul__with_activation_and_gradient(activation):
    x, y = (torch.randn(shape, requires_grad=True) for shape in ((32, 64), (64, 16)))
    torch_activation = {
        "none": lambda t: t,
        "relu": torch.relu,
        "gelu": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }[activation]
    out, expected = matmul(x, y, activation=activation, block=(16, 16, 32)), torch_activation(x @ y)
    torch.testing.assert_close(out, expected, **F32)
    g = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, (x, y), g), torch.autograd.grad(expected, (x, y), g), strict=True):
        torch.testing.assert_close(ours, theirs, **F32)


def test_matmul__rejects_bad_shapes_and_activations():
    with error("bridge.example_shape"):
        matmul(torch.randn(33, 64), torch.randn(64, 16), block=(16, 16, 32))
    with error("bridge.example_activation", activation="tanh"):
        matmul(torch.randn(8, 8), torch.randn(8, 8), activation="tanh")


def test_vmap__equals_broadcasting():
    xs, ys = torch.randn(3, 8, 128), torch.randn(8, 128)
    torch.testing.assert_close(torch.func.vmap(add_vectors, in_dims=(0, None))(xs, ys), xs + ys, rtol=0, atol=0)
    inner = torch.func.vmap(add_vectors, in_dims=(1, None))  # the mapped tensors are not contiguous
    torch.testing.assert_close(inner(xs.transpose(0, 1).contiguous(), ys), xs + ys, rtol=0, atol=0)
    twice = torch.func.vmap(torch.func.vmap(matmul, in_dims=(0, None)), in_dims=(1, 0))
    a, b = torch.randn(3, 2, 16, 32), torch.randn(2, 32, 8)
    torch.testing.assert_close(twice(a, b), torch.einsum("ijmk,jkn->jimn", a, b), **F32)


def test_vmap__supports_backward():
    a, b = torch.randn(3, 16, 32, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    out, expected = torch.func.vmap(matmul, in_dims=(0, None))(a, b), a @ b
    g = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, (a, b), g), torch.autograd.grad(expected, (a, b), g), strict=True):
        torch.testing.assert_close(ours, theirs, **F32)


def test_gradient__defaults_to_jax_vjp():
    op = pallas_op(lambda x, y: (jnp.sin(x) * y, jnp.argmax(x)), name="sin_times")
    x, y = (torch.randn(5, 7, requires_grad=True) for _ in range(2))
    value, index = op(x, y)
    assert index.dtype == torch.int32 and index.item() == x.argmax().item()
    value.sum().backward()
    torch.testing.assert_close(x.grad, x.cos() * y)
    torch.testing.assert_close(y.grad, x.sin())


def test_gradient_of_a_bare_kernel__message():
    op = pallas_op(quickstart.add_vectors_jax, name="add_without_vjp")
    x = torch.randn(8, 128, requires_grad=True)
    with error("bridge.not_differentiable") as caught:
        op(x, x).sum().backward()
    assert "pallas_op(jax_fn, vjp=...)" in str(caught.value)


def test_vjp__receives_outputs_and_float_cotangents():
    def double(x, ids):
        return 2 * x, ids + 1

    def vjp(primals, outputs, cotangents):
        assert outputs[0].shape == (4,) and cotangents[1] is None
        return cotangents[0] * outputs[0], None

    x, ids = torch.randn(4, requires_grad=True), torch.arange(4, dtype=torch.int32)
    pallas_op(double, vjp=vjp)(x, ids)[0].sum().backward()
    torch.testing.assert_close(x.grad, 2 * x)


def test_vjp__of_wrong_shape_raises():
    op = pallas_op(lambda x: x * 1.0, vjp=lambda primals, outputs, cotangents: (cotangents[0][:1],), name="bad_vjp")
    with error("bridge.vjp_shape", input=0):
        op(torch.randn(4, requires_grad=True)).sum().backward()


def test_inputs__share_memory_with_jax(monkeypatch):
    seen = []
    original = jax.dlpack.from_dlpack
    monkeypatch.setattr(jax.dlpack, "from_dlpack", lambda t: seen.append((t, original(t))) or seen[-1][1])
    x = torch.randn(64, 128)
    out = add_vectors(x, x)
    assert [array.unsafe_buffer_pointer() for _, array in seen] == [x.data_ptr()] * 2
    assert out.data_ptr() != x.data_ptr()


def test_outputs__do_not_alias_and_inputs_may_be_unaligned():
    x = torch.randn(129)[1:]  # 4 bytes past the alignment that XLA needs on the CPU
    torch.testing.assert_close(add_vectors(x, x), 2 * x)
    same, again = pallas_op(lambda x: (x, x), name="twice_itself")(x.clone())
    assert same.data_ptr() != again.data_ptr()


def test_op__compiles_and_exports():
    x, y = torch.randn(8, 128, requires_grad=True), torch.randn(8, 128)
    compiled = torch.compile(lambda a, b: add_vectors(a, b) * 3, fullgraph=True, backend="aot_eager")
    out = compiled(x, y)
    torch.testing.assert_close(out, (x + y) * 3)
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))

    class Product(torch.nn.Module):
        def forward(self, a, b):
            return matmul(a, b, activation="relu")

    a, b = torch.randn(16, 32), torch.randn(32, 8)
    program = torch.export.export(Product(), (a, b))
    assert any(node.target is torch.ops.vitkernels.matmul.default for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(a, b), torch.relu(a @ b), **F32)


def test_op__passes_opcheck():
    x = torch.randn(8, 128)
    torch.library.opcheck(add_vectors.torch_op, ([x, x.clone()], "((), ())", torch.device("cpu")))


def test_fake_tensors__infer_shape_and_dtype():
    with torch._subclasses.FakeTensorMode():
        out = matmul(torch.empty(16, 32, dtype=torch.bfloat16), torch.empty(32, 8, dtype=torch.bfloat16))
    assert out.shape == (16, 8) and out.dtype == torch.bfloat16


def test_static_arguments__may_be_functions():
    def apply(x, *, function):
        return function(x)

    op = pallas_op(apply, name="apply_function")
    x = torch.randn(4)
    torch.testing.assert_close(op(x, function=jax.nn.relu), torch.relu(x))
    torch.testing.assert_close(op(x, function=jnp.sin), torch.sin(x))
    with error("bridge.static_not_hashable"):
        op(x, function=[1])


def _times(x, *, by):
    return x / by[0] if isinstance(by, tuple) else x * by


@pytest.mark.parametrize("nested", [False, True], ids=["literal", "with a function"])
def test_static_arguments__that_compare_equal_get_separate_traces(nested):
    """1, 1.0 and True need different traces, as do 0.0 and -0.0, forward and backward."""
    if nested:
        op = pallas_op(lambda x, *, by, function: function(x, by=by), name="times_by_function")
        op = functools.partial(op, function=_times)
    else:
        op = pallas_op(_times)
    ones = torch.ones(2, dtype=torch.int32)
    # JAX multiplies integers by a bool or an int to integers, and by a float to floats.
    assert [op(ones, by=by).dtype for by in (1, 1.0, True)] == [torch.int32, torch.float32, torch.int32]
    assert [op(torch.ones(2), by=(by,))[0].item() for by in (0.0, -0.0)] == [float("inf"), float("-inf")]
    x = torch.ones(2, requires_grad=True)
    gradients = [torch.autograd.grad(op(x, by=(by,)).sum(), x)[0][0].item() for by in (0.0, -0.0)]
    assert gradients == [float("inf"), float("-inf")]


def test_op_names__are_unique():
    names = ["taken", "taken", "taken_2", "taken_2_2", "grown", "grown_backward", "shrunk_backward", "shrunk"]
    made = [pallas_op(lambda x, k=k: x * k, name=name) for k, name in enumerate(names)]
    assert len({op.__name__ for op in made}) == len(made) and [op.__name__ for op in made[:2]] == ["taken", "taken_2"]
    for k, op in enumerate(made):
        x = torch.ones(2, requires_grad=True)
        out = op(x)
        assert out[0].item() == k and torch.autograd.grad(out.sum(), x)[0][0].item() == k


def test_other_derivatives__raise():
    op = pallas_op(lambda x: jnp.sin(x), name="sin_once")
    x = torch.randn(4, requires_grad=True)
    with error("bridge.second_derivative", operation="sin_once"):
        torch.autograd.grad(op(x).sum(), x, create_graph=True)
    tangent = torch.ones(4)
    with torch.autograd.forward_ad.dual_level(), error("bridge.derivative", operation="sin_once"):
        op(torch.autograd.forward_ad.make_dual(x.detach(), tangent))
    compiled = torch.compile(op, backend="aot_eager")
    assert torch.equal(compiled(x), op(x))
    with torch.autograd.forward_ad.dual_level(), error("bridge.derivative", operation="sin_once"):
        compiled(torch.autograd.forward_ad.make_dual(x.detach(), tangent))
    with error("bridge.derivative", operation="sin_once"):
        torch.compile(lambda x: torch.func.jvp(op, (x,), (tangent,)), backend="eager")(x.detach())
    ways = [
        lambda x: torch.func.jvp(op, (x,), (tangent,)), lambda x: torch.func.vjp(op, x),
        torch.func.jacrev(op), torch.func.jacfwd(op), torch.func.grad(lambda x: op(x).sum()),
        torch.func.vmap(torch.func.grad(lambda x: op(x))), torch.func.grad(lambda x: torch.func.vmap(op)(x).sum()),
    ]  # fmt: skip
    for way in ways:
        with error("bridge.derivative", operation="sin_once"):
            way(x.detach())


def test_output_shape_dtype_fn__is_checked():
    declared = pallas_op(quickstart.add_vectors_jax, lambda x, y: [(x.shape, x.dtype)], name="add_declared")
    x = torch.randn(8, 128)
    torch.testing.assert_close(declared(x, x), 2 * x)
    wrong = pallas_op(quickstart.add_vectors_jax, lambda x, y: [(x.shape, torch.int32)], name="add_misdeclared")
    with error("bridge.declared_outputs"):
        wrong(x, x)


def test_invalid_arguments__raise():
    x = torch.randn(8, 128)
    with error("bridge.not_contiguous", argument=1):
        add_vectors(torch.randn(128, 8), x.t())
    with error("bridge.dtype_64", argument=0, dtype=torch.float64):
        add_vectors(x.double(), x.double())
    with error("bridge.dtype_64", argument=0, dtype=torch.int64):
        add_vectors(x.long(), x.long())
    with error("bridge.dtype", argument=0, dtype=torch.complex64):
        add_vectors(x.to(torch.complex64), x)
    with error("bridge.mixed_devices", devices=["cpu", "meta"]):
        add_vectors(x, x.to("meta"))
    with error("bridge.mixed_devices", devices=["cpu", "meta"]):
        add_vectors(x, x, device="meta")
    with pytest.raises(TypeError):
        add_vectors(x, 1.0)
    with error("bridge.no_output"):
        pallas_op(lambda x: None, name="forgetful")(x)


def test_trace__is_cached_per_shape():
    traced = []

    def count(x):
        traced.append(x.shape)
        return x + 1

    op = pallas_op(count)
    for rows in (2, 2, 3, 2, 3):
        op(torch.zeros(rows, 4))
    assert traced == [(2, 4), (3, 4)]


def test_cpu_programs__least_recently_used_are_dropped(monkeypatch):
    """Each is mapped into memory many times, and the kernel bounds a process's maps."""
    monkeypatch.setattr(pallas_devices, "_CPU_PROGRAMS", 2)
    op = pallas_op(lambda x: x * 2, name="doubled")

    def maps():
        gc.collect()
        return len(Path("/proc/self/maps").read_text().splitlines())

    for length in (1, 2, 3):
        assert torch.equal(op(torch.ones(length)), torch.full((length,), 2.0))
    before = maps()
    for length in (*range(4, 12), 1):
        assert torch.equal(op(torch.ones(length)), torch.full((length,), 2.0))
    assert len(pallas_devices._cpu_programs) == 2 and maps() < before + 15  # nine programs have 27


def test_interpreter__reaches_kernels_in_control_flow_and_jit():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    @jax.jit
    def bump(x):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def looped(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: bump(x), x)
        return jax.lax.cond(x[0] > 2, bump, lambda x: -x, x)

    torch.testing.assert_close(pallas_op(looped)(torch.zeros(8)), torch.full((8,), 4.0))


def test_lowering_for_tpu__needs_no_tpu():
    module = Trace.of("add", quickstart.add_vectors_jax, (((8, 128), torch.float32),) * 2).hlo("tpu")
    assert b"tpu_custom_call" in module
    assert jax.config.jax_platforms == "cpu" or "tpu" not in jax.config.jax_platforms


def test_keep_jax_off_tpu__raises_if_jax_holds_it(monkeypatch):
    monkeypatch.setattr(jax_compat, "_initialized_backends", lambda: {"cpu": None, "tpu": None})
    jax_compat.keep_jax_off_tpu(torch_xla_in_use=False)
    with error("bridge.tpu_taken"):
        jax_compat.keep_jax_off_tpu(torch_xla_in_use=True)


def test_keep_jax_off_tpu__raises_if_jax_is_configured_to_open_it(monkeypatch):
    monkeypatch.setattr(jax_compat, "_initialized_backends", dict)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "tpu,cpu")
    try:
        with error("bridge.tpu_requested", platforms="tpu,cpu"):
            jax_compat.keep_jax_off_tpu(torch_xla_in_use=True)
    finally:
        jax.config.update("jax_platforms", before)


def test_cuda_context__is_preserved(monkeypatch):
    class Driver:
        current = 7

        def cuCtxGetCurrent(self, context):
            context._obj.value = self.current

        def cuCtxSetCurrent(self, context):
            self.current = context.value

    driver, started = Driver(), []

    def devices():
        driver.current = 8  # as if on a machine with a second GPU
        started.append("cpu")

    monkeypatch.setattr(cuda_context, "_cuda_driver", lambda: driver)
    monkeypatch.setattr(jax_compat, "_initialized_backends", lambda: started)
    monkeypatch.setattr(jax, "local_devices", devices)
    jax_compat.initialize_backends()
    jax_compat.initialize_backends()
    assert driver.current == 7 and started == ["cpu"]
    with pytest.raises(RuntimeError), cuda_context.preserved_cuda_context():
        driver.current = 8
        raise RuntimeError
    assert driver.current == 7


@pytest.mark.parametrize(("rank", "visible"), [(None, None), ("3", "3")])
def test_platforms__limit_jax_to_the_gpu_of_its_process(monkeypatch, rank, visible):
    set_to = {}
    monkeypatch.setattr(type(jax.config), "update", lambda self, name, value: set_to.update({name: value}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(jax_compat, "has_cuda_plugin", lambda: True)
    monkeypatch.delenv("JAX_CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # the user's setting takes precedence
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    jax_compat._choose_platforms()
    assert set_to.pop("jax_platforms") == "cuda,cpu"
    assert set_to == ({} if visible is None else {"jax_cuda_visible_devices": visible})
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
