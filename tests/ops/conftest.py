"""Fixtures of the op suites."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Fill new tensors with NaN, and integers with their maximum, to expose elements that no kernel writes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _quick_kernels(quick_kernels):
    """See tests/conftest.py."""
