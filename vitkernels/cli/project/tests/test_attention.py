"""The conformance suite of vitkernels on the backend."""

import mine  # noqa: F401, registers the backend

from vitkernels.testing import AttentionConformance


class TestMine(AttentionConformance):
    """Forward and gradients against a float64 reference, in every layout and with every extra."""

    backend = "mine"
