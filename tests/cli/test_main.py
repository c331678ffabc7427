"""The `vitkernels` command: the arguments that reach train.py, and how mistakes are reported."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vitkernels.cli import early_stop, embed, predict
from vitkernels.cli import main as console
from vitkernels.config.help import help_text
from vitkernels.config.schema import Config
from vitkernels.config.setting import groups_of, settings_of
from vitkernels.errors import EXIT_INTERRUPTED

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def started(monkeypatch):
    """The command lines that train.py was started with."""
    found = []
    monkeypatch.setattr(console.runpy, "run_path", lambda path, run_name: found.append([path, *sys.argv]))
    monkeypatch.setattr(sys, "argv", ["vitkernels"])
    return found


def test_train__passes_its_arguments_to_the_script(started):
    assert console.main(["train", "attn=sdpa", "--cfg", "job"]) == 0
    script = str(ROOT / "train.py")
    assert started == [[script, script, "attn=sdpa", "--cfg", "job"]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["runs/a", "data.root=x"], ['checkpoint="runs/a"', "data.root=x"]),
        (["checkpoint=runs/a"], ["checkpoint=runs/a"]),
        (["attn=sdpa", "checkpoint=runs/a"], ["attn=sdpa", "checkpoint=runs/a"]),
        (["--cfg", "job"], ["--cfg", "job"]),
    ],
)
def test_eval__first_argument_is_the_run(started, words, expected):
    console.main(["eval", *words])
    assert started[0][2:] == ["mode=eval", *expected]


def test_eval__path_with_an_equals_sign(started, tmp_path, monkeypatch):
    (tmp_path / "attn=sdpa").mkdir()
    monkeypatch.chdir(tmp_path)
    console.main(["eval", "attn=sdpa"])
    assert started[0][2:] == ["mode=eval", 'checkpoint="attn=sdpa"']


@pytest.mark.parametrize(("code", "status"), [(75, 75), (None, 0), ("text", 1), (2, 2)])
def test_train__returns_the_exit_status(monkeypatch, code, status):
    def run_path(path, run_name):
        raise SystemExit(code)

    monkeypatch.setattr(sys, "argv", ["vitkernels"])
    monkeypatch.setattr(console.runpy, "run_path", run_path)
    assert console.main(["train"]) == status


def test_train__signals_end_it_at_once_until_it_sets_handlers(monkeypatch):
    found = []
    monkeypatch.setattr(sys, "argv", ["vitkernels"])
    monkeypatch.setattr(console.runpy, "run_path", lambda path, run_name: found.append(signal.getsignal(signal.SIGINT)))
    before = signal.getsignal(signal.SIGINT)
    assert console.main(["train"]) == 0
    assert found == [early_stop._end] and signal.getsignal(signal.SIGINT) is before


def test_early_stop__has_the_status_of_an_interrupted_run():
    program = "import os, signal; from vitkernels.cli import early_stop; early_stop.end_at_signals(); "
    for number in (signal.SIGINT, signal.SIGTERM):
        words = [sys.executable, "-c", f"{program}os.kill(os.getpid(), {int(number)})"]
        ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert ended.returncode == EXIT_INTERRUPTED and ended.stdout.count("\n") == 1, ended
        assert "Traceback" not in ended.stderr


def test_predict__interrupted_is_one_line(monkeypatch, capsys):
    def stop(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(predict, "main", stop)
    assert console.main(["predict", "run", "images"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_train__without_the_extra_names_it(monkeypatch, capsys, started):
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: None)
    assert console.main(["train"]) == 2 and not started
    assert "vitkernels[train]" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "hint"), [("trian", "train"), ("attn=sdpa", "vitkernels train attn=sdpa")])
def test_unknown_command__suggests_one(capsys, command, hint):
    assert console.main([command]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--help"], ["help"]])
def test_help__lists_the_commands(capsys, words):
    assert console.main(words) == 0
    text = capsys.readouterr().out
    assert [command for command in console._COMMANDS if f"\n  {command} " not in text] == []


def test_help__needs_no_torch():
    code = "import sys; from vitkernels.cli.main import main; main(['--help']); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.endswith("False\n")


def test_doctor__takes_no_arguments(capsys):
    with pytest.raises(SystemExit) as end:
        console.main(["doctor", "x"])
    assert end.value.code == 2 and "doctor" in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in console._COMMANDS if name not in ("train", "eval")])
def test_help_of_a_command__is_its_own(capsys, command):
    with pytest.raises(SystemExit) as end:
        console.main([command, "--help"])
    printed = capsys.readouterr()
    assert end.value.code == 0 and not printed.err and printed.out.startswith(f"usage: vitkernels {command} ")


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["runs/a", "--help"]])
def test_help_of_eval__says_how_it_differs_from_train(started, capsys, words):
    assert console.main(["eval", *words]) == 0 and not started
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: vitkernels eval ") and not printed.err
    assert "Unlike train" in printed.out and max(map(len, printed.out.splitlines())) <= 120


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.ENOTDIR])
def test_embed__unwritable_output_is_one_line(monkeypatch, capsys, code):
    def fail(words):
        raise OSError(code, os.strerror(code), "/mnt/x.npz")

    monkeypatch.setattr(embed, "main", fail)
    assert console.main(["embed", "run", "images"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "/mnt/x.npz" in line


def test_embed__other_system_errors_are_raised(monkeypatch):
    def fail(words):
        raise OSError(errno.EIO, "I/O error")

    monkeypatch.setattr(embed, "main", fail)
    with pytest.raises(OSError, match="I/O error"):
        console.main(["embed", "run", "images"])


def test_help_of_train__has_every_setting():
    text = help_text()
    for prefix, group in (("", Config), *((f"{name}.", group) for name, group in groups_of(Config).items())):
        for each in settings_of(group):
            assert f"  {prefix}{'*' if each.description.collects_rest else each.name}" in text
    assert max(map(len, text.splitlines())) <= 120


def test_help_of_train__tolerates_a_closed_pipe():
    """`train.py --help | head` closes the pipe before all of the text is written."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 0
    process.stderr.close()


def test_stdout__prints_paths_that_are_not_utf_8(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert console.main(["--version"]) == 0
    print(os.fsdecode(b"m\xe9d.jpg"), flush=True)
    assert stdout.buffer.getvalue().endswith(b"m\\udce9d.jpg\n")
