"""Fixtures of the attention suites."""

import pytest


@pytest.fixture(autouse=True)
def _quick_kernels(quick_kernels):
    """See tests/conftest.py."""


@pytest.fixture
def detects_races(monkeypatch, capsys):
    """Fail a test if no barrier or fence orders two accesses of an interpreted Hopper kernel to shared memory.

    The interpreter wants a fence wherever the TMA unit writes what a warpgroup has read. Hardware needs none behind
    products, sums of loads and reads of tickets and records, which have completed when their results are used. So a
    fence is added there. It may hide that another one is missing, but hides no missing barrier between warpgroups.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from vitkernels.attention.pallas_flash.hopper import async_product, fused_order, tiles, work_items

    def fence_behind(module, name: str) -> None:
        function = getattr(module, name)

        def fenced(*args, **options):
            result = function(*args, **options)
            plgpu.commit_smem()
            return result

        monkeypatch.setattr(module, name, fenced)

    fence_behind(tiles, "accumulated")
    fence_behind(tiles, "products")
    fence_behind(async_product, "start")
    fence_behind(fused_order, "row_sums")
    fence_behind(work_items.WorkItems, "with_span")
    release_ticket = fused_order.OrderedKernel.give_ticket_back

    def give_ticket_back(*args, **options):
        plgpu.commit_smem()
        release_ticket(*args, **options)

    monkeypatch.setattr(fused_order.OrderedKernel, "give_ticket_back", give_ticket_back)
    watched = plgpu.InterpretGPUParams(uninitialized_memory="nan", detect_races=True)
    monkeypatch.setattr(tiles, "INTERPRETED", watched)
    yield
    printed = capsys.readouterr().out
    assert "RACE DETECTED" not in printed, printed[:4000]
