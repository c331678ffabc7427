"""Serve runs of train.py: import the slow packages once, and fork a process for each request.

Third-party packages only: each run imports the project's own modules itself. A request is a line of JSON on standard
input, {"words": [train.py, override, ...], "folder": where to run, "log": file for what it says}; the reply is its exit
code.
"""

import gc
import json
import os
import runpy
import sys
import traceback

# Neither Triton nor JAX: their threads do not survive a fork.
import hydra  # noqa: F401
import sklearn.datasets
import sklearn.model_selection  # noqa: F401
import timm  # noqa: F401
import torch
import torch.distributed.checkpoint
import torch.utils.tensorboard  # noqa: F401


def run(request: dict) -> int:
    """Run train.py in this process as Python runs a script; return its exit code."""
    words = request["words"]
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(request["folder"])
    sys.argv = words
    sys.path[0] = os.path.dirname(words[0])
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve() -> None:
    gc.freeze()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = run(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
