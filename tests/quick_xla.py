"""Training under torch_xla on a CPU without XLA's optimizations, which take longer than the steps of a test."""

QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
