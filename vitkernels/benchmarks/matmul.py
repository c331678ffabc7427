"""Square products in bfloat16, int8 and fp8: ours beside the library's, measured on a GPU or TPU, else estimated.

A row is one product of (size, size) matrices: its time and the share of the chip's peak that it reaches. The matrices
lie in memory as a linear layer's do on a GPU, x (M, K) and w (N, K), and as (K, N) on a TPU.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vitkernels.benchmarks.attention import Timing
from vitkernels.errors import UsageError
from vitkernels.runtime.peaks import peak_flops
from vitkernels.tpu_estimate import dump as tpu_dump
from vitkernels.tpu_estimate import program

SIZES = (1024, 2048, 4096, 8192)
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Row:
    """Milliseconds of one product. how: measured or ESTIMATE. peak: operations per second, None where not known."""

    size: int
    dtype: str
    contender: str
    ms: float
    how: str
    device: str
    peak: float | None

    @property
    def tera(self) -> float:
        """Tera-operations per second; a multiply-add is two."""
        return 2 * self.size**3 / self.ms / 1e9

    @property
    def utilisation(self) -> float | None:
        return None if self.peak is None else self.tera * 1e12 / self.peak

    def json(self) -> dict:
        return asdict(self) | {"tera": self.tera, "utilisation": self.utilisation}


def place() -> str:
    """Where rows() would run: gpu, tpu, or estimate (TPU v5e, from the compiler's schedule)."""
    from vitkernels.runtime import xla

    if torch.cuda.is_available():
        return "gpu"
    return "tpu" if xla.has_tpu() and xla.unavailable() is None else "estimate"


def rows(where: str, dtype: str, size: int) -> Iterator[Row]:
    """The contenders' rows; nothing where the place has no product in that dtype."""
    if dtype not in DTYPES:
        raise UsageError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    yield from {"gpu": _on_gpu, "tpu": _on_tpu, "estimate": _estimated}[where](dtype, size)


# --- GPU --------------------------------------------------------------------------------------------------------------


def _on_gpu(dtype: str, size: int) -> Iterator[Row]:
    device = torch.cuda.get_device_name()
    peak = peak_flops(device, DTYPES[dtype])
    for name, function in _gpu_contenders(dtype, size).items():
        yield Row(size, dtype, name, Timing.on_device(function).median, "measured", device, peak)


def _gpu_contenders(dtype: str, size: int) -> dict[str, Callable[[], object]]:
    """Calls on random matrices, the first again at the end: the difference between the two is noise."""
    if dtype == "bf16":
        x, w = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        contenders = {"torch.mm": lambda: x @ w.T}
    elif dtype == "int8":
        from vitkernels.ops import int8_matmul

        x, w = (torch.randint(-128, 128, (size, size), device="cuda", dtype=torch.int8) for _ in range(2))
        contenders = {"torch._int_mm": lambda: torch._int_mm(x, w.T)}
        contenders["triton"] = lambda: int8_matmul(x, w.T, backend="triton")
    else:
        from vitkernels.ops.int8_matmul.triton_product import product

        x, w = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device="cuda")
        contenders = {
            "torch._scaled_mm": lambda: torch._scaled_mm(
                x, w.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            "triton": lambda: product(x, w.T, torch.bfloat16),
        }
    first = next(iter(contenders))
    return contenders | {f"{first} again": contenders[first]}


# --- TPU --------------------------------------------------------------------------------------------------------------


def _on_tpu(dtype: str, size: int) -> Iterator[Row]:
    """Through torch_xla, many calls one after another; the host's share is in it where it is the slower side."""
    import torch_xla

    from vitkernels.bridge import pallas_op
    from vitkernels.ops.int8_matmul import pallas_tpu_kernel
    from vitkernels.runtime.xla import XlaRuntime

    if dtype == "fp8":
        return
    device = XlaRuntime("auto").device_name
    ours = pallas_op(pallas_tpu_kernel.matmul, name="bench_matmul_tpu")
    x, w = (torch.randint(-128, 128, (size, size), dtype=torch.int8).to(DTYPES[dtype]) for _ in range(2))
    x, w = x.to(torch_xla.device()), w.to(torch_xla.device())
    library = pallas_op(_library, name="bench_matmul_xla")
    for name, function in {"xla": lambda: library(x, w), "pallas": lambda: ours(x, w)}.items():
        ms = time_xla(function)
        yield Row(size, dtype, name, ms, "measured", device, peak_flops(device, DTYPES[dtype]))


def time_xla(function: Callable[[], object], calls: int = 50) -> float:
    """Milliseconds of one call, each a graph of its own, without compilation."""
    import torch_xla

    def run(calls: int) -> float:
        torch_xla.sync(wait=True)
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
            torch_xla.sync()
        torch_xla.sync(wait=True)
        del result
        return (time.perf_counter() - start) / calls * 1e3

    run(2)
    return run(calls)


# --- estimates --------------------------------------------------------------------------------------------------------


def build(contender: str, dtype: str, size: int):
    """A contender as a JAX function, and the shapes of its arrays."""
    import jax
    import jax.numpy as jnp

    from vitkernels.ops.int8_matmul import pallas_tpu_kernel

    array = jax.ShapeDtypeStruct((size, size), {"bf16": jnp.bfloat16, "int8": jnp.int8}[dtype])
    return {"pallas": pallas_tpu_kernel.matmul, "xla": _library}[contender], (array, array)


def _library(x, w):
    """XLA's own product, as a JAX function."""
    import jax.numpy as jnp

    return jnp.matmul(x, w, preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else x.dtype)


def _estimated(dtype: str, size: int) -> Iterator[Row]:
    if dtype == "fp8":
        return
    for contender in ("xla", "pallas"):
        with tempfile.TemporaryDirectory(prefix="vitkernels_matmul_") as folder:
            dump = tpu_dump.compile_in(Path(folder), f"{__name__}:build", contender, dtype, size)
            ms = program.estimate(dump).estimate_ms
        yield Row(size, dtype, contender, ms, "ESTIMATE", "TPU v5e", peak_flops("TPU v5e", DTYPES[dtype]))
