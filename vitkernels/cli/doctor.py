"""`vitkernels doctor`: print versions, devices, what runs on this machine, and how to fix what does not.

It prints one line for each device, each runtime (runtime=NAME) and each attention backend (attn=NAME). If one cannot
run here, its line says why, and what to install or set. The command changes nothing.
"""

import argparse
import platform

from vitkernels import attention
from vitkernels.provenance import git_commit, versions
from vitkernels.runtime import cuda, xla

_INTERPRETED_ON_CPU = ("triton_flash", "pallas_flash")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="vitkernels doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(arguments)
    for name, version in {**versions(), "git commit": git_commit()}.items():
        print(f"{name:14}{version or '-'}")
    print()
    print(*devices(), sep="\n")
    for setting, reasons in (("runtime", runtimes()), ("attn", backends())):
        print()
        width = max(14, *(len(name) + 1 for name in reasons))
        for name, reason in reasons.items():
            how = _how_it_runs(setting, name) if reason is None else f"cannot run: {reason}"
            limitation = attention.get(name).limitation() if setting == "attn" and reason is None else None
            print(f"{setting}={name:{width}}{how}{f', {limitation}' if limitation else ''}")


def runtimes() -> dict[str, str | None]:
    """Return, for each runtime, why it cannot be used here; None if it can."""
    return {"cpu": None, "cuda": cuda.unavailable(), "xla": xla.unavailable()}


def backends() -> dict[str, str | None]:
    """Return, for each attention backend, why it cannot be used here; None if it can."""
    return {name: attention.broken(name) or attention.get(name).unavailable() for name in attention.names()}


def devices() -> list[str]:
    """Return one line for each device of this machine."""
    import torch

    threads = torch.get_num_threads()
    lines = [f"CPU: {platform.machine()}, {threads} thread{'' if threads == 1 else 's'}"]
    if cuda.unavailable() is None:
        for i in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(i).total_memory / 2**30
            lines.append(f"GPU {i}: {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
    if xla.has_tpu():
        host = xla.host()
        worker = "" if host is None else f", worker {host.rank} of a slice of {len(host.addresses)} hosts"
        lines.append(f"TPU: attached{worker}")
    return lines


def _how_it_runs(setting: str, name: str) -> str:
    """Return how an available runtime or backend runs here: on its device, or on the CPU for tests."""
    has_gpu, has_tpu = cuda.unavailable() is None, xla.has_tpu()
    if setting == "runtime":
        on_cpu = name == "xla" and not has_tpu
        return "runs on this machine's CPU, for tests: no TPU is attached" if on_cpu else "runs"
    places = [place for place, is_present in (("cuda", has_gpu), ("xla", has_tpu)) if is_present]
    compiled = name not in _INTERPRETED_ON_CPU or any(name in attention.candidates(place) for place in places)
    return "runs" if compiled else "runs interpreted, slowly, for tests"


if __name__ == "__main__":
    main()
