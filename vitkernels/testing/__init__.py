"""Conformance tests for custom backends; requires pytest.

from vitkernels.testing import AttentionConformance

class TestMine(AttentionConformance):
    backend = "mine"  # a registered name, or the backend itself
"""

import pytest

pytest.register_assert_rewrite(
    f"{__name__}.attention", f"{__name__}.attention_harness", f"{__name__}.attention_reference"
)

from vitkernels.testing.attention import AttentionConformance  # noqa: E402

__all__ = ["AttentionConformance"]
