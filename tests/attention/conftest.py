"""Fixtures of the attention suites."""

import pytest


@pytest.fixture(autouse=True)
def _quick_kernels(quick_kernels):
    """See tests/conftest.py."""


@pytest.fixture
def detects_races(monkeypatch, capsys):
    """Fail a test if an interpreted Hopper kernel accesses shared memory without a barrier or a fence in between.

    The interpreter wants a fence wherever the TMA unit writes what a warpgroup has read. Products have completed when
    their results are used, and so have loads whose sum is used, so that hardware needs no fence behind these.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from vitkernels.attention.pallas_flash.hopper import fused_order, tiles

    def fenced(function):
        def call(*args, **options):
            result = function(*args, **options)
            plgpu.commit_smem()
            return result

        return call

    for module, name in (
        (tiles, "accumulated"),
        (tiles, "products"),
        (tiles, "row_sums"),
        (fused_order, "row_sums"),
    ):
        monkeypatch.setattr(module, name, fenced(getattr(module, name)))
    watched = plgpu.InterpretGPUParams(uninitialized_memory="nan", detect_races=True)
    monkeypatch.setattr(tiles, "INTERPRETED", watched)
    yield
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed[:4000]
