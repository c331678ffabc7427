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
from vitkernels.tpu_estimate import chips, compiler, dump, flops, refusals

_FLAGS = (
    "--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true "
    "--xla_jf_dump_llo_pass_label_regex=post-ra|utilization"
)
_LOG, _ERROR = "compiler_output.log", "compiler_error.json"


def compile_in(folder: Path, build: str, *arguments, chip: str = "v5e", timeout: float = 900) -> dump.CompilationDump:
    """Compile a program in a separate process and return the files that it wrote to `folder`.

    Args:
        build: "package.module:function". The function is called with `arguments` in the process, and returns the
            arguments of `compiler.compile_jax` (a JAX function, its jax.ShapeDtypeStructs, ...) or of
            `compiler.compile_hlo` (a serialized module, its aliases, ...).
        timeout: seconds.

    Raises UsageError with the end of the compiler's message: code tpu_estimate.compile, its field `reason` in one line,
    tpu_estimate.vmem if the program needs more VMEM than there is, or tpu_estimate.timeout. A UsageError of `build` is
    raised here as it is.
    """
    flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {_FLAGS.format(folder=folder)}".strip()
    environment = os.environ | {"LIBTPU_INIT_ARGS": flags, "JAX_PLATFORMS": "cpu"}
    job = {"folder": str(folder), "chip": chip, "build": build, "arguments": arguments, "timeout": timeout}
    if _server().poll() is not None:  # for example killed for exceeding memory
        _server.cache_clear()
    server = _server()
    # With sys.path, the child can import everything that this process can.
    print(json.dumps(job | {"environment": environment, "path": sys.path}), file=server.stdin, flush=True)
    assert server.stdout is not None  # a pipe
    status = server.stdout.readline().strip()
    if status == str(-signal.SIGALRM):
        message = f"{build}{arguments}: compilation took longer than {timeout:g} s"
        raise UsageError(message, code="tpu_estimate.timeout", timeout=timeout)
    if status != "0":
        raise _failure(folder, f"{build}{arguments}", chip, status)
    return dump.CompilationDump(folder, chips.chip(chip))


def _failure(folder: Path, what: str, chip: str, status: str) -> UsageError:
    """Return the error to raise for a process that exited with this status."""
    output, errors = folder / _LOG, folder / _ERROR
    raised = json.loads(errors.read_text()) if errors.exists() else {}
    if "code" in raised:
        return UsageError(raised["message"], code=raised["code"], **raised["fields"])
    end = output.read_text(errors="replace")[-2000:] if output.exists() else "the compilation process did not start"
    message = f"{what} does not compile for {chip} (status {status or 'unknown'}):\n{end}"
    reason = refusals.one_line(raised.get("message") or end)
    if needed := refusals.vmem_needed(raised.get("message", "")):
        return UsageError(message, code="tpu_estimate.vmem", chip=chip, reason=reason, **needed)
    return UsageError(message, code="tpu_estimate.compile", chip=chip, reason=reason)


@cache
def _server() -> subprocess.Popen:
    """Start the server that forks a process per compilation; it exits when this process does."""
    modules = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": modules}
    # -W ignore: JAX warns that forking is unsafe with threads, but has not started any yet.
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closing its stdin ends it
    return server


def _serve() -> None:
    """Read one job per line of JSON, and reply with the exit status of its process: -N if killed by signal N."""
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            _run_job(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run_job(folder, chip, build, arguments, timeout, environment, path) -> None:
    """Compile in the forked process, then exit it."""
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
    except BaseException as error:
        traceback.print_exc()
        Path(folder, _ERROR).write_text(json.dumps(_described(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _described(error: BaseException) -> dict:
    """Return the message of an error, and the code and fields of a UsageError."""
    if isinstance(error, UsageError):
        return {"message": str(error), "code": error.code, "fields": error.fields}
    return {"message": f"{type(error).__name__}: {error}"}


def _compile(folder: Path, chip: str, build: str, arguments: list) -> None:
    """Compile, and write the optimized module and its memory sizes next to the compiler's own dump."""
    module, function = build.split(":")
    built: Any = getattr(importlib.import_module(module), function)(*arguments)
    if isinstance(built[0], bytes):
        executable = compiler.compile_hlo(built[0], chip, *built[1:])
    else:
        traced = compiler.trace_jax(*built, chip=chip)  # type: ignore[misc]  # built has no chip
        (folder / dump.FLOPS).write_text(json.dumps(flops.matrix_flops(traced.jaxpr)))
        executable = traced.lower().compile().runtime_executable()
    analysis = executable.get_compiled_memory_stats()
    kinds = ("argument", "output", "temp", "alias", "generated_code")
    memory = {kind: getattr(analysis, f"{kind}_size_in_bytes") for kind in kinds}
    (folder / dump.MEMORY).write_text(json.dumps(memory))
    (folder / dump.MODULE).write_text(executable.hlo_modules()[0].to_string())


if __name__ == "__main__":
    _serve()
