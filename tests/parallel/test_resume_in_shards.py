"""Runs on shards that are killed in the middle of an epoch and of a shard, and resumed, on up to four processes."""

import json
import signal
import sys
from pathlib import Path

import pytest
from ranks import Ranks

from vitkernels.errors import EXIT_INTERRUPTED

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from shard_fixtures import write_tars

STEPS = 10  # two epochs of 5 steps, with checkpoints after even steps: always in the middle of an epoch
KILL = """
import os, signal
from vitkernels.data.shard_files.source import ShardSource

read, images = ShardSource.read, []

def read_and_die(self, index, limit=None):
    images.extend([index] * (limit is None))  # others are headers
    if len(images) > {images}:
        os.kill(os.getpid(), signal.SIGKILL)
    return read(self, index, limit)

ShardSource.read = read_and_die
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    root = write_tars(folder / "s", train=43, val=6)  # shards of 6 images, steps of 8
    data = ["data=shards", f"data.root={root}", f"data.cache={folder}/cache", "data.window=12", "data.num_workers=0"]
    run = [f"trainer.max_steps={STEPS}", "trainer.eval_every=null", "checkpoints.every_steps=2", "resume=auto"]
    return [*data, *run, "model.in_chans=3", "data.re_prob=0.5"]


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.fixture(scope="module")
def undisturbed(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "alone"
    ranks = Ranks(1, folder, *words, "data.batch_size=8")
    assert ranks.finish() == [0], ranks.output()
    return losses(folder)


@pytest.mark.slow
@pytest.mark.parametrize("killed, resumed", [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (1, 4)])
def test_shards__a_killed_run_resumes_with_the_same_samples(words, undisturbed, tmp_path, killed, resumed):
    """Bit for bit on one process; on several, up to the order of the gradients' sums: 1e-7 a step, grown by AdamW."""
    folder = tmp_path / "run"
    images = 59 // killed  # of step 8, in the second epoch; the checkpoint of step 6 may be incomplete
    ranks = Ranks(killed, folder, *words, f"data.batch_size={8 // killed}",
                  before=dict.fromkeys(range(killed), KILL.format(images=images)))  # fmt: skip
    # A process that still waits for a killed one aborts before it kills itself.
    assert {-signal.SIGKILL} <= set(ranks.finish()) <= {-signal.SIGKILL, EXIT_INTERRUPTED}, ranks.output()
    ranks = Ranks(resumed, folder, *words, f"data.batch_size={8 // resumed}")
    assert ranks.finish() == [0] * resumed and "resumed from" in ranks.output(0), ranks.output()
    found = losses(folder)
    assert list(found) == list(range(1, STEPS + 1))
    assert found == (undisturbed if killed == resumed == 1 else pytest.approx(undisturbed, rel=1e-5))
