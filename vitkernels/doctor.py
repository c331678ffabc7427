"""`python -m vitkernels.doctor`: versions, devices, what can run here, and the command that mends what cannot."""

import platform

from rich.console import Console
from rich.table import Table

from vitkernels import attention
from vitkernels.environment import git_commit, versions
from vitkernels.runtime import cuda, xla


def runtimes() -> dict[str, str | None]:
    """Each runtime, and why it cannot be used here (None where it can)."""
    return {"cpu": None, "cuda": cuda.unavailable(), "xla": xla.unavailable()}


def backends() -> dict[str, str | None]:
    """Each attention backend, and why it cannot be used here (None where it can)."""
    return {name: attention.get(name).unavailable() for name in attention.names()}


def devices() -> list[str]:
    """The devices of this machine, in words."""
    import torch

    found = [f"CPU: {platform.machine()}, {torch.get_num_threads()} threads"]
    if cuda.unavailable() is None:
        for i in range(torch.cuda.device_count()):
            memory = torch.cuda.get_device_properties(i).total_memory / 2**30
            found.append(f"GPU {i}: {torch.cuda.get_device_name(i)}, {memory:.0f} GiB")
    if xla.has_tpu():
        found.append("TPU: attached")
    return found


def _verdicts(title: str, verdicts: dict[str, str | None]) -> Table:
    table = Table(title, "", "")
    for name, reason in verdicts.items():
        table.add_row(name, "[green]runs[/]" if reason is None else "[red]cannot[/]", reason or "")
    return table


def main() -> None:
    console = Console()
    table = Table("package", "version")
    for name, version in versions().items():
        table.add_row(name, version or "[dim]not installed[/]")
    table.add_row("git commit", git_commit() or "[dim]not in a checkout[/]")
    console.print(table)
    for device in devices():
        console.print(device)
    console.print(_verdicts("runtime=", runtimes()))
    console.print(_verdicts("attn=", backends()))


if __name__ == "__main__":
    main()
