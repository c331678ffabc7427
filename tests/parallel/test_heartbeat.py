"""Whether a process of this host runs, as the heartbeat asks."""

import os
import subprocess
import sys

import pytest

from vitkernels.parallel import heartbeat

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs Linux's /proc")


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def test_is_alive__until_the_process_ends(process):
    assert heartbeat._is_alive(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not heartbeat._is_alive(process.pid), "a zombie"
    process.wait()
    assert not heartbeat._is_alive(process.pid)


def test_is_alive__of_a_process_that_is_reaped_between_opening_and_reading(process, monkeypatch):
    def opened(path):
        file = open(path)  # noqa: SIM115 (the caller closes it)
        process.kill()
        process.wait()
        return file

    monkeypatch.setattr(heartbeat, "open", opened, raising=False)
    assert not heartbeat._is_alive(process.pid)
