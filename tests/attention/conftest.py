"""Fixtures of the attention suites."""

import pytest


@pytest.fixture(autouse=True)
def _quick_kernels(quick_kernels):
    """See tests/conftest.py."""
