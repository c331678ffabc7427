"""The TPU chips that can be estimated, and the published figures that the estimates use.

Sources: cloud.google.com/tpu/docs/v5e, /v5p and /v6e (bf16 peak, HBM size and bandwidth, cores per chip). The clock is
the frequency at which the matrix units reach the peak: 4 units of 128² at 1.5 GHz are 197 Tflop/s.
"""

from dataclasses import dataclass

from vitkernels.errors import unknown_name


@dataclass(frozen=True)
class Chip:
    """One TPU chip; bandwidth in bytes per second."""

    name: str
    topology: str  # the smallest slice of this chip that libtpu describes; programs are compiled for one chip of it
    clock_hz: float
    hbm_bandwidth: float
    hbm_bytes: int
    peak_flops: float  # bfloat16
    cores: int = 1  # the compiler splits a program's operations across them where it can
    validated: bool = False  # whether estimates for this chip were compared with published timings

    @property
    def core_bandwidth(self) -> float:
        return self.hbm_bandwidth / self.cores


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e:2x2", 1.5e9, 819e9, 16 * 2**30, 197e12, validated=True),
        Chip("v6e", "v6e:2x2", 1.75e9, 1640e9, 32 * 2**30, 918e12),
        Chip("v5p", "v5p:2x2x1", 1.75e9, 2765e9, 95 * 2**30, 459e12, cores=2),
    )
}


def chip(name: str) -> Chip:
    """Return the chip with this name; raise UsageError with the choices if the name is unknown."""
    if name not in CHIPS:
        raise unknown_name("TPU", name, CHIPS)
    return CHIPS[name]
