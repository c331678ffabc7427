"""Time square matmuls in bfloat16, int8 and fp8, this package's and the vendor library's, measured or estimated.

A row is one matmul of (size, size) matrices: its time, and the share of the chip's peak that it reaches. On a GPU the
matrices have the layout of a linear layer, x (M, K) and w (N, K); on a TPU w is (K, N).
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from vitkernels.benchmarks.timing import Timing
from vitkernels.errors import unknown_name
from vitkernels.runtime.peaks import peak_flops
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import estimate_program

SIZES = (1024, 2048, 4096, 8192)
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class MatmulRow:
    """The time of one matmul. how: "measured" or "ESTIMATE". peak: operations per second, or None if unknown."""

    size: int
    dtype: str
    contender: str
    ms: float
    how: str
    device: str
    peak: float | None

    @property
    def tera(self) -> float:
        """Return tera-operations per second; a multiply-add counts as two."""
        return 2 * self.size**3 / self.ms / 1e9

    @property
    def utilization(self) -> float | None:
        return None if self.peak is None else self.tera * 1e12 / self.peak

    def json(self) -> dict:
        return asdict(self) | {"tera": self.tera, "utilization": self.utilization}


def place() -> str:
    """Return "gpu" or "tpu" if this machine has one, else "estimate" (TPU v5e, from the compiler's schedule)."""
    from vitkernels.runtime import xla

    if torch.cuda.is_available():
        return "gpu"
    return "tpu" if xla.has_tpu() and xla.unavailable() is None else "estimate"


def rows(where: str, dtype: str, size: int) -> Iterator[MatmulRow]:
    """Yield the contenders' rows; none if the hardware has no matmul in that dtype."""
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    yield from {"gpu": _on_gpu, "tpu": _on_tpu, "estimate": _estimated}[where](dtype, size)


# --- GPU --------------------------------------------------------------------------------------------------------------


def _on_gpu(dtype: str, size: int) -> Iterator[MatmulRow]:
    device = torch.cuda.get_device_name()
    peak = peak_flops(device, DTYPES[dtype])
    for name, function in _gpu_contenders(dtype, size).items():
        yield MatmulRow(size, dtype, name, Timing.on_device(function).median, "measured", device, peak)


def _gpu_contenders(dtype: str, size: int) -> dict[str, Callable[[], object]]:
    """Return calls on random matrices; the first one is repeated at the end, to show the noise."""
    contenders: dict[str, Callable[[], object]]
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


def _on_tpu(dtype: str, size: int) -> Iterator[MatmulRow]:
    """Measure back-to-back calls through torch_xla; host time is included if the host is slower."""
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
        yield MatmulRow(size, dtype, name, ms, "measured", device, peak_flops(device, DTYPES[dtype]))


def time_xla(function: Callable[[], object], calls: int = 50) -> float:
    """Return the milliseconds of a call, without compilation; each call is a separate graph."""
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
    """Return a contender as a JAX function, and the shapes of its arrays."""
    import jax
    import jax.numpy as jnp

    from vitkernels.ops.int8_matmul import pallas_tpu_kernel

    array = jax.ShapeDtypeStruct((size, size), {"bf16": jnp.bfloat16, "int8": jnp.int8}[dtype])
    return {"pallas": pallas_tpu_kernel.matmul, "xla": _library}[contender], (array, array)


def _library(x, w):
    """Return XLA's own matmul, as a JAX function."""
    import jax.numpy as jnp

    return jnp.matmul(x, w, preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else x.dtype)


def _estimated(dtype: str, size: int) -> Iterator[MatmulRow]:
    if dtype == "fp8":
        return
    for contender in ("xla", "pallas"):
        with tempfile.TemporaryDirectory(prefix="vitkernels_matmul_") as folder:
            dump = compile_in(Path(folder), f"{__name__}:build", contender, dtype, size)
            ms = estimate_program(dump).estimate_ms
        yield MatmulRow(size, dtype, contender, ms, "ESTIMATE", "TPU v5e", peak_flops("TPU v5e", DTYPES[dtype]))
