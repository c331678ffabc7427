"""`python -m vitkernels.doctor`: versions, devices, what can run here, and the command that mends what cannot."""

import platform

from vitkernels import attention
from vitkernels.provenance import git_commit, versions
from vitkernels.runtime import cuda, xla

_KERNELS = ("triton_flash", "pallas_flash")  # which CPUs interpret


def runtimes() -> dict[str, str | None]:
    """Each runtime, and why it cannot be used here (None where it can)."""
    return {"cpu": None, "cuda": cuda.unavailable(), "xla": xla.unavailable()}


def backends() -> dict[str, str | None]:
    """Each attention backend, and why it cannot be used here (None where it can)."""
    return {name: attention.broken(name) or attention.get(name).unavailable() for name in attention.names()}


def devices() -> list[str]:
    """The devices of this machine, in words."""
    import torch

    found = [f"CPU: {platform.machine()}, {torch.get_num_threads()} threads"]
    if cuda.unavailable() is None:
        for i in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(i).total_memory / 2**30
            found.append(f"GPU {i}: {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
    if xla.has_tpu():
        host = xla.host()
        where = "" if host is None else f", worker {host.rank} of a slice of {len(host.addresses)} hosts"
        found.append(f"TPU: attached{where}")
    return found


def _runs(setting: str, name: str) -> str:
    """How what can run does it on this machine."""
    has_gpu, has_tpu = cuda.unavailable() is None, xla.has_tpu()
    if setting == "runtime":
        return "runs on this machine's CPU, for tests: no TPU is attached" if name == "xla" and not has_tpu else "runs"
    places = [place for place, is_here in (("cuda", has_gpu), ("xla", has_tpu)) if is_here]
    is_compiled = name not in _KERNELS or any(name in attention.candidates(place) for place in places)
    return "runs" if is_compiled else "runs interpreted, slowly, for tests"


def main() -> None:
    for name, version in {**versions(), "git commit": git_commit()}.items():
        print(f"{name:14}{version or '-'}")
    print()
    print(*devices(), sep="\n")
    for setting, verdicts in (("runtime", runtimes()), ("attn", backends())):
        print()
        for name, reason in verdicts.items():
            print(f"{setting}={name:14}{_runs(setting, name) if reason is None else 'cannot run: ' + reason}")


if __name__ == "__main__":
    main()
