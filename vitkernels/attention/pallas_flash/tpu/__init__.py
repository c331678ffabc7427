"""Flash attention for TPU in Pallas; interpreted on the CPU."""
