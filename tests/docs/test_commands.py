"""Every command and example of README.md and docs/ runs, or can be composed, or gives the reason (docs_blocks.py)."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import forked
import pytest
from docs_blocks import ROOT, Block, blocks, pages
from hydra.core.override_parser.overrides_parser import OverridesParser
from quick_xla import QUICK_XLA

from vitkernels.cli import main as console
from vitkernels.config.compose import compose

BLOCKS = list(blocks())
os.environ["USE_TORCH_XLA"] = "false"  # else Accelerate and transformers train on torch_xla's CPU if it is installed
# Programs of others, and of the shell.
FOREIGN = {"tensorboard", "git", "cd"}


def _of(how: str, *languages: str) -> list:
    chosen = [block for block in BLOCKS if block.how == how and block.language in languages]
    return [pytest.param(b, id=b.id, marks=[pytest.mark.slow] if b.slow else []) for b in chosen]


# ------------------------------------------------------------------------------------------------- checked commands


@pytest.mark.parametrize("block", _of("check", "sh", "console"))
def test_commands__are_valid(block):
    for words in block.commands:
        check(words)


def check(words: list[str]) -> None:
    """Raise AssertionError or UsageError if the command could not start."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words
    if program in FOREIGN:
        return
    if program == "pip":
        _check_pip(arguments)
    elif program == "make":
        _check_make(arguments)
    elif program == "torchrun":
        check_settings(arguments[arguments.index("train.py") + 1 :])
    elif program == "vitkernels":
        _check_console(arguments)
    elif program == "python" and arguments[0] == "train.py":
        check_settings(arguments[1:])
    elif program == "python":
        _check_program(arguments)
    else:
        raise AssertionError(f"unknown program {program!r}: check it here, or mark the block with its reason")


def check_settings(words: list[str]) -> None:
    """Compose the configuration; of a sweep, that of its first job."""
    options = {word for word in words if word.startswith("-")}
    assert options <= {"-m", "--cfg", "--help"}, options
    overrides = []
    for override in OverridesParser.create().parse_overrides([w for w in words if "=" in w]):
        name, value = override.key_or_group, override.value()
        if name.startswith("hydra/"):
            assert (ROOT / "conf" / name / f"{value}.yaml").exists(), override.input_line
        elif override.is_sweep_override():
            assert "-m" in options, f"{override.input_line} sweeps, but the command has no -m"
            first = next(iter(override.sweep_iterator()), None) if override.is_discrete_sweep() else None
            overrides += [] if first is None else [f"{name}={first}"]
        elif not name.startswith("hydra."):
            overrides.append(override.input_line)
    compose(overrides)


def _check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for requirement in arguments[1:]:
        found = re.fullmatch(r"(?:vitkernels|\.)(?:\[(.*)\])?", requirement)
        assert found, requirement
        assert set(filter(None, (found[1] or "").split(","))) <= set(extras), requirement


def _check_make(arguments: list[str]) -> None:
    target = next(word for word in arguments if "=" not in word)
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target


def _check_console(arguments: list[str]) -> None:
    command, *words = arguments
    assert command in console._COMMANDS
    if command == "train":
        check_settings(words)
    elif command == "eval":
        check_settings(["mode=eval", f"checkpoint={words[0]}", *words[1:]])
    else:
        _check_options(ROOT / f"vitkernels/cli/{command.replace('-', '_')}.py", words)


def _check_program(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        module, *words = arguments[1:]
        path = ROOT / Path(*module.split(".")).with_suffix(".py")
        shared = ROOT / "vitkernels/cli" / path.name
        _check_options(shared if shared.exists() else path, words)
    else:
        _check_options(ROOT / arguments[0], arguments[1:])


def _check_options(path: Path, words: list[str]) -> None:
    assert path.exists(), path
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in path.read_text(), f"{path.name} has no option {word}"


# ----------------------------------------------------------------------------------------------------- run commands


def _builds_on_page(block: Block) -> bool:
    """Return whether the block runs after the commands of its page; other examples run alone."""
    return block.how == "file" or (
        block.how == "run" and (block.language != "python" or bool(re.fullmatch(r"\S+", block.argument)))
    )


def _pages_that_run() -> list:
    by_page: dict[str, list[Block]] = {}
    for block in filter(_builds_on_page, BLOCKS):
        if block.page == "README.md":  # test_readme__shows_what_a_run_prints
            continue
        by_page.setdefault(block.page, []).append(block)
    return [
        pytest.param(found, id=page, marks=[pytest.mark.slow] if any(b.slow for b in found) else [])
        for page, found in by_page.items()
    ]


@pytest.mark.parametrize("found", _pages_that_run())
def test_commands__run_in_order(found, tmp_path):
    """The commands of a page build on each other, so they share a folder."""
    for block in found:
        run_block(block, tmp_path)


def run_block(block: Block, folder: Path) -> str:
    """Run a block in the folder and return what its commands print."""
    if block.how == "file":
        (folder / block.argument).write_text(block.text)
        return ""
    if block.language == "python":
        run_python(block, folder)
        return ""
    output = ""
    for words in block.commands:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        environment |= {"XLA_FLAGS": QUICK_XLA} if "runtime=xla" in words else {}
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        command = _in_checkout(words, shlex.split(block.argument))
        if command[0] == sys.executable:
            done = forked.run(command[1:], folder, environment)
        else:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{block.id}: {' '.join(command)}\n{done.stdout}\n{done.stderr}"
        output += done.stdout
    return output


def _in_checkout(words: list[str], settings: list[str]) -> list[str]:
    program, *arguments = words
    if program == "python" and arguments[0] == "train.py":
        given = {word.partition("=")[0] for word in settings}
        kept = [word for word in arguments[1:] if word.partition("=")[0] not in given]
        return [sys.executable, str(ROOT / "train.py"), *kept, *([] if "--help" in arguments else settings)]
    if program == "python":
        return [sys.executable, *arguments]
    if program == "vitkernels":
        return [sys.executable, "-m", "vitkernels", *arguments]
    return [str(ROOT / program), *arguments]


# The loader of the Hugging Face Trainer pins memory on machines without an accelerator too.
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize("block", [p for p in _of("run", "python") if not _builds_on_page(p.values[0])])
def test_examples__run(block, tmp_path, monkeypatch):
    # Lightning asks torch_xla for the type of a TPU even if there is none; without an answer, torch_xla fails.
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    # libtpu, in this process for other examples, profiles itself by SIGPROF. Lightning resets handlers that Python does
    # not know, and the signal's default ends the process.
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
    run_python(block, tmp_path)


def run_python(block: Block, folder: Path) -> None:
    text = block.text
    for before, after in re.findall(r'("[^"]+") -> ("[^"]+")', block.argument):
        assert before in text, f"{block.id} has no {before}"
        text = text.replace(before, after)
    here = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(text, block.id, "exec"), {"__name__": "example"})
    finally:
        os.chdir(here)


@pytest.mark.parametrize("block", _of("check", "python"))
def test_examples__compile(block):
    compile(block.text, block.id, "exec")


# ---------------------------------------------------------------------------------------------------- shown output


def test_readme__shows_what_a_run_prints(tmp_path):
    """Figures differ from machine to machine; the lines are those of today's program."""
    block = next(block for block in BLOCKS if block.page == "README.md" and block.how == "run")
    shown = (ROOT / "README.md").read_text().split("```text\n")[1].split("```")[0].splitlines()
    printed = {without_figures(line) for line in run_block(block, tmp_path).splitlines()}
    assert [line for line in shown if line != "..." and without_figures(line) not in printed] == []


def without_figures(line: str) -> str:
    line = re.sub(r"\S*/summary.json", "summary.json", line)
    return re.sub(r"# threads?", "# threads", re.sub(r"\d[\d.e+-]*", "#", line))


# ----------------------------------------------------------------------------------------------------------- marks


def test_marks__belong_to_blocks():
    """A misspelled mark would leave its block unmarked."""
    marks = [f"{page.name}: {line}" for page in pages() for line in page.read_text().splitlines()
             if re.match(r"<!-- *(run|skip|check|file)\b", line)]  # fmt: skip
    assert len(marks) == sum(block.how != "check" for block in BLOCKS)


def test_skipped_blocks__have_a_reason():
    assert all(len(block.argument) > 10 for block in BLOCKS if block.how == "skip")
