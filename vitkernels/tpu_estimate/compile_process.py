"""Compile for a TPU in a separate process, and keep the schedules that the compiler dumps.

libtpu reads its flags once, when it is loaded, so each compilation needs its own process. The process is forked from a
server that has imported PyTorch and JAX but initialized no backend, because the imports take longer than most
compilations. Only the last stages of each kernel's schedule are dumped: the full dump of a large kernel is about 100 MB
of text.
"""

import atexit
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from functools import cache
from pathlib import Path
from typing import Any

from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import chips, compiler, dump

_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true "
    "--xla_jf_dump_llo_pass_label_regex=post-ra|utilization"
)
_LOG = "compiler_output.log"


def compile_in(folder: Path, build: str, *arguments, chip: str = "v5e", timeout: float = 900) -> dump.CompilationDump:
    """Compile a program in a separate process and return the files that it wrote to `folder`.

    Args:
        build: "package.module:function". The function is called with `arguments` in the process, and returns the
            arguments of `compiler.compile_jax` (a JAX function, its jax.ShapeDtypeStructs, ...) or of
            `compiler.compile_hlo` (a serialized module, its aliases, ...).
        timeout: seconds.

    Raises UsageError (code tpu_estimate.compile or tpu_estimate.timeout) with the end of the compiler's message.
    """
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS.format(folder=folder)}".strip()
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
    job = {"folder": str(folder), "chip": chip, "build": build, "arguments": arguments, "timeout": timeout}
    if _server().poll() is not None:  # killed, for instance for want of memory
        _server.cache_clear()
    server = _server()
    # The path makes everything importable that this process can import.
    print(json.dumps(job | {"environment": environment, "path": sys.path}), file=server.stdin, flush=True)
    assert server.stdout is not None  # a pipe
    status = server.stdout.readline().strip()
    if status == str(-signal.SIGALRM):
        message = f"{build}{arguments}: compilation takes longer than {timeout:g} s"
        raise UsageError(message, code="tpu_estimate.timeout", timeout=timeout)
    if status != "0":
        output = Path(folder, _LOG)
        end = output.read_text(errors="replace")[-2000:] if output.exists() else "the compiling process did not start"
        message = f"{build}{arguments} does not compile for {chip} (status {status or 'unknown'}):\n{end}"
        raise UsageError(message, code="tpu_estimate.compile", chip=chip, build=build)
    return dump.CompilationDump(folder, chips.chip(chip))


@cache
def _server() -> subprocess.Popen:
    """Start the process that compilations are forked from; it ends with this one."""
    modules = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": modules}
    # -W ignore: JAX warns that forking is unsafe with threads, but has not started any yet.
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes its input
    return server


def _serve() -> None:
    """Answer each job, a line of JSON, with the exit status of its process: -N if signal N ended it."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _run_job(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_job(folder, chip, build, arguments, timeout, environment, path) -> None:
    """Compile in the forked process, and end it."""
    log = os.open(Path(folder, _LOG), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.setitimer(signal.ITIMER_REAL, timeout)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    status = 1
    try:
        _compile(Path(folder), chip, build, arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _compile(folder: Path, chip: str, build: str, arguments: list) -> None:
    """Compile, and write the optimized module and its memory sizes next to the compiler's own dump."""
    module, function = build.split(":")
    built: Any = getattr(importlib.import_module(module), function)(*arguments)
    if isinstance(built[0], bytes):
        executable = compiler.compile_hlo(built[0], chip, *built[1:])
    else:
        executable = compiler.compile_jax(*built, chip=chip).runtime_executable()  # type: ignore[misc]  # built has no chip
    analysis = executable.get_compiled_memory_stats()
    kinds = ("argument", "output", "temp", "alias", "generated_code")
    memory = {kind: getattr(analysis, f"{kind}_size_in_bytes") for kind in kinds}
    (folder / dump.MEMORY).write_text(json.dumps(memory))
    (folder / dump.MODULE).write_text(executable.hlo_modules()[0].to_string())


if __name__ == "__main__":
    _serve()
