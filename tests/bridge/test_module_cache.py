"""Lowered modules are kept on disk, under names that cover everything that they depend on."""

from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
from hopper import needs_new_jax

from vitkernels.bridge import module_cache


@dataclass(frozen=True)
class Scaled:
    factor: float

    def __call__(self, x):
        return x * self.factor

    def negative(self, x):
        return -self(x)


KERNEL, SHAPES = Scaled(2.0), (jax.ShapeDtypeStruct((8,), jnp.float32),)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Scaled, "__module__", "vitkernels.some_op")
    return tmp_path / "mosaic_gpu"


@pytest.fixture
def lowered():
    return []


@pytest.fixture
def get(lowered):
    def lower(function, shapes):
        lowered.append(function)
        return repr((function, shapes)).encode()

    return lambda function=KERNEL, shapes=SHAPES: module_cache.cached(lower, function, shapes)


def test_cached__lowers_a_kernel_once(get, lowered, folder):
    assert get() == get(Scaled(2.0)) == repr((KERNEL, SHAPES)).encode()
    assert lowered == [KERNEL] and len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "function, shapes",
    [
        (Scaled(3.0), SHAPES),
        (KERNEL.negative, SHAPES),
        (KERNEL, (jax.ShapeDtypeStruct((16,), jnp.float32),)),
        (KERNEL, (jax.ShapeDtypeStruct((8,), jnp.bfloat16),)),
    ],
    ids=["field", "method", "shape", "dtype"],
)
def test_cached__lowers_what_differs(get, lowered, function, shapes):
    get()
    assert get(function, shapes) == get(function, shapes) == repr((function, shapes)).encode()
    assert len(lowered) == 2


def test_cached__lowers_again_if_the_source_or_a_version_differs(get, lowered, monkeypatch):
    get()
    monkeypatch.setattr(module_cache, "_versions", lambda: ("another",))
    get()
    assert len(lowered) == 2


def test_versions__differ_with_the_source_and_the_options(monkeypatch, tmp_path):
    versions = module_cache._versions.__wrapped__
    before = versions()
    assert versions() == before
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", "somewhere")
    assert versions() != before
    monkeypatch.delenv("MOSAIC_GPU_DUMP_TO")
    (tmp_path / "kernel.py").write_text("x = 1")
    monkeypatch.setattr(module_cache.vitkernels, "__file__", str(tmp_path / "__init__.py"))
    first = versions()
    (tmp_path / "kernel.py").write_text("x = 2")
    assert len({first, versions(), before}) == 3


@pytest.mark.parametrize("damage", [b"", b"short", lambda content: content[:-1], lambda content: content + b"\0"])
def test_cached__lowers_again_if_the_file_is_damaged(get, lowered, folder, damage):
    module = get()
    (path,) = folder.iterdir()
    path.write_bytes(damage if isinstance(damage, bytes) else damage(path.read_bytes()))
    assert get() == get() == module
    assert len(lowered) == 2


def test_cached__keeps_nothing_if_the_folder_cannot_be_written(get, lowered, folder):
    folder.write_text("a file where the folder should be")
    assert get() == get()
    assert len(lowered) == 2


def test_cached__lowers_functions_without_a_description_each_time(get, lowered, folder, monkeypatch):
    get(torch.neg)
    get(lambda x: x)
    monkeypatch.setattr(Scaled, "__module__", "some_other_package")
    get(replace(KERNEL, factor=4.0))
    assert len(lowered) == 3 and not folder.exists()


@needs_new_jax
def test_kernel__of_each_pass_and_op_is_lowered_once(monkeypatch, folder):
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels
    from vitkernels.bridge import mosaic_gpu
    from vitkernels.ops.linear.pallas_hopper_kernel import LinearProduct

    def modules():
        call = AttentionKernels(2, 3, 300, 300, 64, torch.bfloat16, False, 0.125, True, torch.device("cuda", 0))
        product = LinearProduct(304, 256, 128, "bfloat16", 66, True)
        kernels = call.forward, call.dq, call.dkdv, mosaic_gpu.Kernel(product, product.inputs())
        return [kernel.module for kernel in kernels]

    first = modules()
    assert len(set(first)) == len(list(folder.iterdir())) == 4
    monkeypatch.setattr(mosaic_gpu, "mosaic_module", None)
    assert modules() == first
