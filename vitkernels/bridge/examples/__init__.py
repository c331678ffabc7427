"""Worked examples of the bridge: the Pallas quickstart's small kernels, each registered as a torch op in one line."""
