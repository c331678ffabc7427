"""Flash attention for NVIDIA Hopper in Pallas (Mosaic GPU)."""
