"""Flash attention for NVIDIA Hopper in Pallas, through Mosaic GPU."""
