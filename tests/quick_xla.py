"""XLA for the CPU without optimizations, which take longer than the programs of a test run."""

import json

OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,  # fused loops are written as LLVM's code at once, and not as MLIR first
    "xla_cpu_parallel_codegen_split_count": 1,
}
# For JAX 0.7 and torch_xla 2.9.
QUICK_XLA = " ".join(f"--{name}={json.dumps(value)}" for name, value in OPTIONS.items())


def options_of_jax() -> dict[str, int | bool]:
    """Return the compiler options that this JAX knows."""
    import jax

    return {k: v for k, v in OPTIONS.items() if jax.__version_info__ < (0, 8) or k != "xla_cpu_use_fusion_emitters"}
