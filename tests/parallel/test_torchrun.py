"""train.py on several processes trains as on one, and reports a process that fails, hangs or straggles."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import ROOT, SMALL, Ranks

from vitkernels.errors import EXIT_INTERRUPTED
from vitkernels.models import read_state_dict


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return losses, {line["step"]: line for line in lines if "loss" not in line}


def steps(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


@pytest.mark.slow
def test_resume__on_other_numbers_of_processes_matches_one_process(tmp_path):
    """FSDP on 4; resumed on 2 with two micro-batches, with DDP then FSDP; resumed on one with four.

    A step always has 32 images. Sums over processes are taken in another order: 1e-7 a step, which 12 steps of AdamW
    amplify to 1e-5 at most.
    """
    common = ["checkpoints.every_steps=2", "ema.decay=0.9", "trainer.eval_every=1", "resume=auto"]
    alone = Ranks(1, tmp_path / "alone", *common, "data.batch_size=32", "trainer.max_steps=12")
    assert alone.finish() == [0], alone.output()
    folder = tmp_path / "shared"
    for world, engine, accum, until in ((4, "fsdp", 1, 3), (2, "ddp", 2, 6), (2, "fsdp", 2, 9), (1, "none", 4, 12)):
        words = [
            f"parallel={engine}",
            "data.batch_size=8",
            f"trainer.accum_steps={accum}",
            f"trainer.max_steps={until}",
        ]
        ranks = Ranks(world, folder, *common, *words)
        assert ranks.finish() == [0] * world, ranks.output()
        assert (f"resumed from {folder}" in ranks.output(0)) == (world < 4)
        assert not any("step" in ranks.output(rank) for rank in range(1, world)), "only rank 0 logs"
        files = [p.name for p in (folder / f"checkpoints/step_{until:08d}").iterdir()]
        assert sum(name.startswith("rank_") for name in files) == world
        assert json.loads((folder / "summary.json").read_text())["devices"] == world
    expected, evaluations = metrics(tmp_path / "alone")
    losses, ours = metrics(folder)
    assert losses == pytest.approx(expected, rel=1e-5) and len(losses) == 12
    assert [ours[step]["val_images"] for step in (3, 6, 9, 12)] == [360] * 4, "each image counted once"
    for figure in ("val_loss", "val_ema_loss", "val_top1"):
        assert ours[12][figure] == pytest.approx(evaluations[12][figure], rel=1e-5), figure
    for name in ("model.safetensors", "model_ema.safetensors", "checkpoints/step_00000012"):
        one, other = read_state_dict(tmp_path / "alone" / name), read_state_dict(folder / name)
        assert one.keys() == other.keys()
        # Adam divides by the gradient's own size: a weight whose gradient is near zero moves by up to lr = 1e-3 a step.
        assert all((one[k] - other[k]).abs().max() < 3e-3 for k in one)
    assert not torch.equal(
        *(read_state_dict(folder / f"{n}.safetensors")["head.weight"] for n in ("model", "model_ema"))
    )


def test_fused_ops__match_one_process_with_mixup_and_clipping(tmp_path):
    """The tests that kill runs cover eager ops with mixup; all cover clipping at 1.0."""
    words = ["data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}", "trainer.clip_grad=0.5", "trainer.max_steps=2"]
    words += ["trainer.eval_every=null", "ops=fused", "++model.kwargs.depth=1"]  # Triton's interpreter is slow
    folders = [tmp_path / engine for engine in ("none", "ddp", "fsdp")]
    for folder in folders:
        world = 1 if folder.name == "none" else 2
        ranks = Ranks(world, folder, *words, f"parallel={folder.name}", f"data.batch_size={16 // world}")
        assert ranks.finish() == [0] * world, ranks.output()
    expected = metrics(folders[0])[0]
    for folder in folders[1:]:
        assert metrics(folder)[0] == pytest.approx(expected, rel=1e-5), folder.name


def test_sigterm__on_one_rank_stops_all_at_the_same_step_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    ranks = Ranks(2, folder, "data.batch_size=8", "trainer.max_steps=100000", "trainer.eval_every=null")
    ranks.wait_until(lambda: steps(folder) >= 6)
    ranks.processes[1].terminate()
    assert ranks.finish() == [EXIT_INTERRUPTED] * 2, ranks.output()
    assert "SIGTERM at step" in ranks.output(0)
    last = max(metrics(folder)[0])
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [f"step_{last:08d}"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_rank__is_named_and_the_others_exit(tmp_path, number):
    folder = tmp_path / "run"
    words = ["data.batch_size=4", "trainer.max_steps=100000", "trainer.eval_every=null", "parallel.lost_after=4"]
    ranks = Ranks(3, folder, *words)
    ranks.wait_until(lambda: steps(folder) >= 4)
    lost, begin = ranks.processes[1], time.monotonic()
    os.kill(lost.pid, number)
    for rank in (0, 2):
        ranks.processes[rank].join(60)
    seconds = time.monotonic() - begin
    if number == signal.SIGSTOP:
        lost.kill()
    codes = ranks.finish()
    assert (codes[0], codes[2]) == (EXIT_INTERRUPTED,) * 2, ranks.output()
    what = "died" if number == signal.SIGKILL else "no heartbeat for 4 s"
    for rank in (0, 2):
        assert f"rank 1 (process {lost.pid} on " in ranks.output(rank) and what in ranks.output(rank), ranks.output(
            rank
        )
    assert seconds < 30


def test_full_disk__on_one_rank_costs_only_checkpoints(tmp_path):
    folder = tmp_path / "run"
    first = folder / "checkpoints/step_00000002"
    fill = f"""
import pathlib, resource, threading, time
def fill():
    while not pathlib.Path({str(first)!r}).exists():
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
threading.Thread(target=fill, daemon=True).start()
"""
    words = ["parallel=fsdp", "data.batch_size=4", "trainer.max_steps=10", "checkpoints.every_steps=2"]
    ranks = Ranks(2, folder, *words, "trainer.eval_every=null", before={1: fill})
    assert ranks.finish() == [0, 0], ranks.output()
    assert re.search(r"step 10: \[Errno 27\] File too large", ranks.output(0)), ranks.output()
    kept = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert kept and kept[-1] < "step_00000010" and not any(name.endswith(".tmp") for name in kept)
    read_state_dict(folder / "checkpoints" / kept[-1])


BROKEN = """
import torch
from vitkernels.data.digits import Digits
load = Digits.load
def broken(self, ids, epoch):
    images, targets, problems = load(self, ids, epoch)
    broken.calls += 1
    return (images * float("nan") if broken.calls == 5 else images), targets, problems
broken.calls = 0
Digits.load = broken
"""


def test_nan_on_one_rank__names_the_rank_and_its_samples(tmp_path):
    words = ["data.batch_size=4", "trainer.max_steps=20", "checkpoints.every_steps=2"]
    ranks = Ranks(2, tmp_path / "run", *words, before={1: BROKEN})
    assert ranks.finish() == [1, 1], ranks.output()
    output = ranks.output(0)
    assert all(fact in output for fact in ("nan on rank 1", "step 5", "digits[", "step_00000004")), output


SLOW = """
import time
from vitkernels.data.digits import Digits
load = Digits.load
Digits.load = lambda self, ids, epoch: (time.sleep(0.3), load(self, ids, epoch))[1]
"""


def test_straggler__is_named(tmp_path):
    words = ["data.batch_size=2", "trainer.max_steps=8", "trainer.log_every=8", "trainer.eval_every=null"]
    ranks = Ranks(3, tmp_path / "run", *words, before={2: SLOW})
    assert ranks.finish() == [0] * 3, ranks.output()
    assert "rank 2 on " in ranks.output(0), ranks.output()


KILL_A_WORKER = """
import multiprocessing, os, pathlib, signal, threading, time
from vitkernels.data import workers
workers.process_context = lambda: multiprocessing.get_context("forkserver")  # preloads nothing such as timm
def kill():
    log = pathlib.Path({log!r})
    while not (log.exists() and log.stat().st_size):  # until steps are done
        time.sleep(0.01)
    (worker,) = (p for p in multiprocessing.active_children() if p.daemon)
    os.kill(worker.pid, signal.SIGKILL)
threading.Thread(target=kill, daemon=True).start()
"""
NO_WORKER = """
from vitkernels.data import loader
of = loader.dataloader
loader.dataloader = lambda batches, keys, workers, pin: of(batches, keys, 0, pin)
"""


@pytest.mark.slow
def test_dead_data_worker__is_reported_by_all(tmp_path):
    folder = tmp_path / "run"
    words = ["data.batch_size=4", "trainer.max_steps=100000", "trainer.eval_every=null", "data.num_workers=1"]
    kill = KILL_A_WORKER.format(log=str(folder / "metrics.jsonl"))
    ranks = Ranks(2, folder, *words, before={0: NO_WORKER, 1: kill})  # one worker, since each takes seconds to start
    codes = ranks.finish()
    assert codes[1] == 1 and codes[0] == EXIT_INTERRUPTED, ranks.output()
    assert "[rank 1] error: a data worker died" in ranks.output(1)
    assert "rank 1 failed with WorkerDiedError" in ranks.output(0)


def ranks_of(torchrun: subprocess.Popen) -> dict[int, int]:
    """Return rank -> process id of torchrun's current children."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == torchrun.pid:
                rank = re.search(rb"(?:^|\0)RANK=(\d+)", (folder / "environ").read_bytes())
                found[int(rank[1])] = int(folder.name)
    return found


COMMON = ["trainer.eval_every=null", "resume=auto", "data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}"]
STEPS = 60


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses by step of an uninterrupted run on one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    words = [*COMMON, "data.batch_size=16", f"trainer.max_steps={STEPS}", "checkpoints.every_epochs=null"]
    alone = Ranks(1, folder, *words)
    assert alone.finish() == [0], alone.output()
    return metrics(folder)[0]


@pytest.mark.slow
def test_torchrun__restarts_a_preempted_run_and_resume_continues_a_killed_one(tmp_path, undisturbed):
    """SIGTERM one rank; after torchrun's restart SIGKILL another. The third start skips torchrun, which is faster."""
    folder = tmp_path / "run"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words = [*COMMON, "data.batch_size=8", "trainer.max_steps=30", "checkpoints.every_steps=5"]
    log = tmp_path / "torchrun.log"
    with open(log, "w") as output:
        run = subprocess.Popen(
            [*torchrun, str(ROOT / "train.py"), *SMALL, *words, f"hydra.run.dir={folder}"],
            cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        for number, rank, step in ((signal.SIGTERM, 1, 6), (signal.SIGKILL, 0, 16)):
            deadline = time.monotonic() + 200
            while steps(folder) < step:
                assert run.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.002)
            os.kill(ranks_of(run)[rank], number)
        assert run.wait(200) == 1, log.read_text()  # its one restart is used up
    finally:
        run.kill()
    output = log.read_text()
    assert "SIGTERM at step" in output and output.count("resumed from") == 1, output
    again = Ranks(2, folder, *words)
    assert again.finish() == [0, 0] and "resumed from" in again.output(0), again.output()
    losses = metrics(folder)[0]
    assert list(losses) == list(range(1, 31))
    assert losses == pytest.approx({step: undisturbed[step] for step in losses}, rel=1e-4)  # 30 steps of rounding


def train_under_kills(folder: Path, kills: int, seed: int, *words: str) -> list[str]:
    """Run two processes and kill one or both, `kills` times, a few steps apart; then let the run finish.

    Return what was done, for messages.
    """
    chance, done = random.Random(seed), []
    for _ in range(kills):
        ranks = Ranks(2, folder, *words, "data.batch_size=8", "parallel.lost_after=4")
        step = steps(folder) + chance.randint(1, 8)
        while steps(folder) < step and any(p.is_alive() for p in ranks.processes):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1))  # at any point of a step, a checkpoint or a log line
        number, victims = chance.choice([signal.SIGTERM, signal.SIGKILL]), chance.choice([(0,), (1,), (0, 1)])
        for rank in victims:
            os.kill(ranks.processes[rank].pid, number)
        done.append(f"{number.name} to {victims} at {steps(folder)} steps: exit codes {ranks.finish()}")
    ranks = Ranks(2, folder, *words, "data.batch_size=8")
    assert ranks.finish() == [0, 0], f"{done}\n{ranks.output()}"
    return done


@pytest.mark.slow
def test_random_kills__leave_the_losses_of_an_uninterrupted_run(tmp_path, undisturbed):
    words = [*COMMON, f"trainer.max_steps={STEPS}", "checkpoints.every_steps=3"]
    done = train_under_kills(tmp_path / "run", 3, 2, *words)
    assert sum("exit codes [0, 0]" in one for one in done) == 0, f"the run finished before it was killed: {done}"
    losses = metrics(tmp_path / "run")[0]
    assert losses == pytest.approx(undisturbed, rel=1e-4) and len(losses) == STEPS, done  # 60 steps of rounding


def test_occupied_run_folder__is_refused_by_all_ranks(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints/step_00000002").mkdir(parents=True)
    ranks = Ranks(2, folder, "data.batch_size=4")
    assert ranks.finish() == [2, 2], ranks.output()
    assert f"{folder} already holds a run" in ranks.output(0)


def test_cuda_graphs__are_refused_with_fsdp(tmp_path):
    ranks = Ranks(2, tmp_path / "run", "parallel=fsdp", "compile=reduce-overhead")
    assert ranks.finish() == [2, 2], ranks.output()
    assert "fsdp does not support CUDA graphs" in ranks.output(0) and "reduce-overhead" in ranks.output(0)
