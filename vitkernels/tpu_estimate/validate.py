"""Compare the method's estimates with published timings of real TPUs.

`recorded_ms` is the estimate when the row was last recomputed, with 0.105 ms of host dispatch where the published time
was taken on the host. That dispatch and the latency of a copy (simulate.py) are the only constants fitted, each to all
rows at once. `reestimate` repeats the rows whose programs can be built here (published_cases.py). Rows with poor
agreement are kept; `note` gives the cause, as far as it is known.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import chips, prefetched, published_cases
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import estimate_program

DISPATCH_MS = 0.105
MATMUL = "https://docs.jax.dev/en/latest/pallas/tpu/matmul.html"
SPARSE = "https://docs.jax.dev/en/latest/pallas/tpu/sparse.html"
FLASH = "https://github.com/jax-ml/jax/issues/24633"


@dataclass(frozen=True)
class PublishedTiming:
    """One published timing, in milliseconds; `program` holds the arguments of `published_cases.build`, if any."""

    what: str
    recorded_ms: float
    published_ms: float
    source: str
    program: tuple = ()
    chip: str = "v5e"
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.recorded_ms / self.published_ms


PUBLISHED = (
    PublishedTiming("XLA matmul bf16 4096³", 0.825, 0.827, MATMUL, ("xla", 4096)),
    PublishedTiming("XLA matmul bf16 8192³", 5.917, 6.047, MATMUL, ("xla", 8192)),
    PublishedTiming(
        "Pallas matmul 512×1024×1024 blocks, 1024³", 0.122, 0.127, MATMUL, ("pallas", 1024, 512, 1024, 1024)
    ),
    PublishedTiming(
        "Pallas matmul 512×1024×1024 blocks, 4096³", 0.853, 0.889, MATMUL, ("pallas", 4096, 512, 1024, 1024)
    ),
    PublishedTiming(
        "Pallas matmul 512×1024×1024 blocks, 8192³", 5.982, 6.099, MATMUL, ("pallas", 8192, 512, 1024, 1024)
    ),
    PublishedTiming("Pallas matmul, right side transposed, 1024³", 0.122, 0.121, MATMUL),
    PublishedTiming("Pallas matmul, right side transposed, 4096³", 0.854, 0.879, MATMUL),
    PublishedTiming("Pallas matmul, right side transposed, 8192³", 5.991, 6.108, MATMUL),
    PublishedTiming("Pallas matmul 128³ blocks, 1024³", 0.299, 0.298, MATMUL, ("pallas", 1024, 128, 128, 128)),
    PublishedTiming("Pallas matmul 128³ blocks, 8192³", 98.75, 91.8, MATMUL, ("pallas", 8192, 128, 128, 128)),
    PublishedTiming("XLA matmul bf16 16384³", 46.28, 46.95, SPARSE, ("xla", 16384)),
    PublishedTiming("XLA mask · (x @ y), 16384³", 48.37, 49.99, SPARSE, ("masked", 16384)),
    PublishedTiming("Pallas sparse mask, 16384³", 28.03, 28.65, SPARSE, ("sparse", 16384)),
    PublishedTiming("JAX flash forward B32 H8 D64, N 512", 2.233, 2.36, FLASH, ("flash", 32, 8, 512, 64)),
    PublishedTiming("JAX flash forward, N 1024", 8.840, 9.49, FLASH, ("flash", 32, 8, 1024, 64)),
    PublishedTiming("JAX flash forward, N 2048", 34.62, 37.61, FLASH, ("flash", 32, 8, 2048, 64)),
    PublishedTiming("JAX flash forward, N 4096", 135.6, 144.97, FLASH, ("flash", 32, 8, 4096, 64)),
)
# Published figures of real TPUs that no program here corresponds to: (figure, source, why it is not compared).
NOT_COMPARED = (
    (
        "Llama 2 70B: MFU 57 % on v5e-256, 65 % on v5p-128",
        "https://github.com/google/maxtext/blob/main/getting_started/Run_Llama2.md",
        "a sharded decoder of 256 chips",
    ),
    (
        "Llama 3.1 8B: MFU 45.5 % on 256 v6e chips",
        "https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html",
        "a sharded decoder of 256 chips",
    ),
    (
        "Pallas block-sparse product (p = 0.1, 16384³): about 6 × faster than XLA on v5e",
        SPARSE,
        "random blocks; no times given",
    ),
    (
        "mmBERT-base forward, batch 8, 512 tokens: 32.81 ms on v5e",
        "https://github.com/mlnomadpy/flaxchat/blob/master/docs/YAT_MMBERT_LIGHT_SPEED.md",
        "the model and its harness are not here",
    ),
)
CAVEAT = (
    "Every time is an ESTIMATE from libtpu's schedule for TPU v5e; no TPU was used. Estimates deviate from "
    "published timings by -8 to +8 %; the method's two constants were fitted to the same timings. For other programs "
    "expect 10-15 % if they are bound by compute, and -5/+20 % if by memory. No published backward kernel was "
    "available. Differences under 10 % are not significant."
)


def reestimate(case: PublishedTiming) -> float:
    """Return the case's estimate by this checkout and the installed libtpu, in ms.

    Raises UsageError if the case cannot be repeated.
    """
    if not case.program:
        raise UsageError(f"{case.what} cannot be repeated by this checkout", code="tpu_estimate.not_repeatable")
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        chip = chips.chip(case.chip).name
        dump = compile_in(Path(folder), f"{published_cases.__name__}:build", *case.program, chip=chip)
        if case.program[0] == "sparse":
            prefetched.insert(Path(folder), published_cases.sparse_scalars(*case.program[1:]))
        program = estimate_program(dump)
    if program.untimed:
        message = f"{case.what}: no readable schedule of {', '.join(program.untimed)}"
        raise UsageError(message, code="tpu_estimate.unreadable_schedule", operations=program.untimed)
    return program.estimate_ms + DISPATCH_MS
