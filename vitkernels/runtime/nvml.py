"""Query NVIDIA's management library about a GPU: clocks, throttling, and the processes that use it.

Calls go to libnvidia-ml, which comes with the driver. A figure that the driver does not give is None.
Reference: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

import ctypes
from functools import cache
from typing import Any

_SM_CLOCK, _TEMPERATURE_OF_GPU = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU
_MAX_PROCESSES = 256
# Bits of nvmlDeviceGetCurrentClocksEventReasons that lower the clocks below what the power limit allows by itself.
THROTTLED = {0x08: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
             0x80: "power brake"}  # fmt: skip
POWER_CAP = "power cap"  # the power limit holds the clocks; normal for a busy data-center GPU
_REASONS = {0x04: POWER_CAP, **THROTTLED}


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


@cache
def _handle(uuid: str) -> ctypes.c_void_p | None:
    library, handle = _library(), ctypes.c_void_p()
    if library is None:
        return None
    name = (uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}").encode()
    return handle if library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(handle)) == 0 else None


def sample(uuid: str) -> dict[str, Any] | None:
    """Return {"sm_mhz", "celsius", "watts", "reasons", "pids"} of the GPU now, or None without NVML.

    reasons: why the clocks are reduced. pids: the processes with a compute context on the GPU, in the driver's
    numbering, which in a container is not the container's.

    Args:
        uuid: of the GPU, as torch.cuda.get_device_properties gives it.
    """
    library, handle = _library(), _handle(uuid)
    if library is None or handle is None:
        return None
    milliwatts = _number(library, "nvmlDeviceGetPowerUsage", handle)
    bits = _number(library, "nvmlDeviceGetCurrentClocksThrottleReasons", handle, kind=ctypes.c_ulonglong)
    return {
        "sm_mhz": _number(library, "nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
        "celsius": _number(library, "nvmlDeviceGetTemperature", handle, _TEMPERATURE_OF_GPU),
        "watts": None if milliwatts is None else round(milliwatts / 1e3, 1),
        "reasons": None if bits is None else [name for bit, name in _REASONS.items() if bits & bit],
        "pids": _pids(library, handle),
    }


def _number(library: ctypes.CDLL, function: str, *arguments: Any, kind: Any = ctypes.c_uint) -> int | None:
    value = kind()
    status = getattr(library, function)(*arguments, ctypes.byref(value))
    return int(value.value) if status == 0 else None


def _pids(library: ctypes.CDLL, handle: ctypes.c_void_p) -> list[int] | None:
    count, found = ctypes.c_uint(_MAX_PROCESSES), (_ProcessInfo * _MAX_PROCESSES)()
    status = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), found)
    return sorted({found[i].pid for i in range(count.value)}) if status == 0 else None
