"""Worked examples of the bridge, after the Pallas quickstart: small kernels, each adopted as a torch op in one line."""
