"""Rounds in which variants take turns: on simulated machines in thousands, with real processes once."""

import contextlib
import json
import math
import os
import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from vitkernels.sweep.judgement import judge, sentences
from vitkernels.sweep.rounds import TurnError, round_times, run_rounds, take_turns
from vitkernels.sweep.statistics import round_ratio, rounds_needed

QUIET = {"cores": 2, "other_cores": 0.0, "cpu_mhz": None}
BUSY = {"cores": 2, "other_cores": 1.0, "cpu_mhz": None}
ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """A machine whose speed wanders, jumps while another process runs, and differs from process to process."""

    def __init__(self, rng: random.Random, cost: dict[str, float], hook=lambda name, turn: 1.0):
        self.rng, self.cost, self.hook = rng, cost, hook
        self.mood, self.burst, self.turns = 0.0, False, 0

    def step_ms(self, name: str, of_process: float) -> float:
        self.turns += 1
        self.mood = 0.95 * self.mood + self.rng.gauss(0, 0.05)  # drifts over tens of turns
        if self.rng.random() < 0.05:
            self.burst = not self.burst  # another process begins or ends: it takes half of the machine
        slow = self.hook(name, self.turns) * (2.0 if self.burst else 1.0)
        return self.cost[name] * slow * math.exp(self.mood + of_process + self.rng.gauss(0, 0.02))

    @contextlib.contextmanager
    def start(self, names):
        yield [Process(self, name) for name in names]


class Process:
    def __init__(self, machine: Machine, name: str):
        self.machine, self.name = machine, name
        self.of_process = machine.rng.gauss(0, 0.05)  # its place in memory, for as long as it lives

    def take(self) -> dict:
        ms = self.machine.step_ms(self.name, self.of_process)
        return {"step_ms": ms, "n": 10, "input_wait_ms": 0.0, "cpu_share": 1.0, "gpu": None}


def row(name: str) -> dict:
    """Return a row of the verdict, with only the keys that judge reads."""
    empty = ("step_time_ms", "model", "flops_per_image", "device", "devices", "precision", "machine", "repeats")
    return {"variant": name, "images_per_step": 10, "interpreted": [], **dict.fromkeys(empty)}


def judged(machine: Machine, names, rounds: int, lap=lambda: QUIET) -> list[dict]:
    record = run_rounds(names, machine.start, rounds, lap, machine.rng.shuffle)
    rows = [row(name) for name in names]
    judge(rows, record)
    return rows


def sweeps(count: int, cost: dict[str, float], rounds: int, hook=lambda name, turn: 1.0, lap=lambda: QUIET):
    for seed in range(count):
        yield judged(Machine(random.Random(seed), cost, hook), list(cost), rounds, lap)


def share(count: int, *arguments, **keywords) -> float:
    """Return the share of the sweeps that call any variant faster or slower than the first."""
    named = [
        any(r["judgement"] in ("faster", "slower") for r in rows) for rows in sweeps(count, *arguments, **keywords)
    ]
    return sum(named) / count


# 5 % is the bound; 600 sweeps put two standard errors on it.
BOUND = 0.05 + 2 * math.sqrt(0.05 * 0.95 / 600)


@pytest.mark.parametrize(("variants", "rounds"), [(2, 6), (2, 8), (2, 12), (4, 9)])
def test_judge__rarely_finds_a_winner_among_copies_under_undetected_load(variants, rounds):
    copies = {f"native {i}": 30.0 for i in range(variants)}
    assert share(600, copies, rounds) <= BOUND


@pytest.mark.parametrize("period", [3, 8, 50])
def test_judge__alternating_slow_downs_give_no_winner_among_copies(period):
    """The hook halves the machine's speed for spans of turns, whoever's turn it is."""

    def hook(name: str, turn: int) -> float:
        return 2.0 if turn // period % 2 else 1.0

    assert share(600, {"native": 30.0, "copy": 30.0}, 8, hook) <= BOUND


def test_judge__late_slow_down_gives_no_winner_among_copies():
    """In a sweep without turns, a load that begins during the second run makes the first 3.4 times faster."""

    def hook(name: str, turn: int) -> float:
        return 3.4 if turn > 32 else 1.0

    assert share(600, {"native": 30.0, "copy": 30.0}, 8, hook) <= BOUND


def test_judge__finds_a_factor_of_two_on_the_same_machines():
    for rows in sweeps(200, {"native": 30.0, "half": 15.0, "copy": 30.0}, 9):
        assert rows[1]["judgement"] == "faster", rows[1]
        low, high = rows[1]["ratio_interval"]
        assert 1 < low < rows[1]["ratio"] < high and 1.6 < rows[1]["ratio"] < 2.4


def test_judge__interval_covers_the_true_ratio():
    covered = [
        rows[1]["ratio_interval"][0] <= 1.1 <= rows[1]["ratio_interval"][1]
        for rows in sweeps(600, {"native": 33.0, "faster": 30.0}, 8)
    ]
    assert sum(covered) / 600 >= 1 - BOUND


def test_judge__busy_machine_gives_no_winner_even_if_the_rounds_agree():
    for rows in sweeps(5, {"native": 30.0, "half": 15.0}, 8, lap=lambda: BUSY):
        assert rows[1]["judgement"] == "open" and len(rows[1]["rounds"]["step_ms"]) == 8
        (sentence,) = sentences(rows)
        assert "no winner" in sentence and "other processes used the CPU" in sentence


def test_judge__quiet_rounds_decide_if_there_are_enough():
    laps = iter(range(10**6))

    def lap() -> dict:  # four laps a round: every fourth round is disturbed
        return BUSY if next(laps) // 4 % 4 == 3 else QUIET

    (rows,) = sweeps(1, {"native": 30.0, "half": 15.0}, 8, lap=lap)
    assert rows[1]["judgement"] == "faster" and rows[1]["rounds"]["quiet"] == 8
    assert len(rows[1]["rounds"]["step_ms"]) == 10


def test_judge__too_few_rounds_give_no_winner():
    (rows,) = sweeps(1, {"native": 30.0, "half": 15.0}, 5)
    assert rows[1]["judgement"] == "open" and rows[1]["ratio_interval"] is None
    assert rows[1]["ratio"] == pytest.approx(2, rel=0.2) and "6 are needed" in rows[1]["open_because"]


def test_run_rounds__drops_a_failing_variant_and_compares_the_others():
    machine = Machine(random.Random(0), {"native": 30.0, "broken": 1.0, "half": 15.0})

    def take(self) -> dict:
        if self.name == "broken" and machine.turns > 20:
            raise TurnError("its process ended: out of memory")
        return original(self)

    original, Process.take = Process.take, take
    try:
        rows = judged(machine, ["native", "broken", "half"], 9)
    finally:
        Process.take = original
    assert [r["judgement"] for r in rows] == [None, None, "faster"] and rows[1]["rounds"] is None


def test_run_rounds__continues_after_what_was_kept():
    machine = Machine(random.Random(0), {"native": 30.0, "gone": 1.0, "half": 15.0})
    kept = []
    first = run_rounds(["native", "half"], machine.start, 2, lambda: QUIET, keep=kept.append)
    assert [len(record["rounds"]) for record in kept] == [1, 2] and kept[-1]["rounds"] == first["rounds"]
    earlier = first | {"failed": {"gone": "its process ended"}, "seconds": 100.0}
    record = run_rounds(["native", "gone", "half"], machine.start, 6, lambda: QUIET, earlier=earlier)
    assert len(record["rounds"]) == 6 and record["rounds"][:2] == first["rounds"] and record["seconds"] >= 100
    assert record["failed"] == earlier["failed"] and round_times(record["rounds"][-1]).keys() == {"native", "half"}


def test_take_turns__is_an_order_and_its_reverse():
    machine = Machine(random.Random(1), {"a": 1.0, "b": 1.0, "c": 1.0})
    with machine.start(["a", "b", "c"]) as processes:
        turns = [turn["variant"] for turn in take_turns(processes, lambda: QUIET)["turns"]]
    assert turns[:3] == turns[5:2:-1] and turns[6:9] == turns[11:8:-1] and set(turns[6:9]) == {"a", "b", "c"}


@pytest.mark.parametrize("n", range(6, 11))
def test_round_ratio__coverage_is_exact(n):
    """Over all signs of n distinct differences around 0, the interval misses 0 in at most 5 %, and not much less."""
    sizes = [1.0 + 0.618 * i + 0.01 * i * i for i in range(n)]
    missed = 0
    for signs in product((-1, 1), repeat=n):
        _, low, high = round_ratio([s * x for s, x in zip(signs, sizes, strict=True)])
        missed += not low < 1 < high
    assert 0.03 < missed / 2**n <= 0.05


def test_rounds_needed__all_agree_by_chance_in_at_most_five_percent():
    assert [rounds_needed(m) for m in (1, 2, 3, 4, 5, 10)] == [6, 7, 7, 8, 8, 9]
    assert round_ratio([0.1] * 5) is None and round_ratio([0.1] * 6) is not None
    assert all(2 / 2 ** rounds_needed(m) <= 0.05 / m < 2 / 2 ** (rounds_needed(m) - 1) for m in range(1, 30))


@pytest.mark.slow
def test_sweep__under_load_a_copy_of_native_is_not_called_faster(tmp_path):
    """Real training, real turns, and a process that burns a core during the runs of the second variant and the rounds.

    trainer.log_every differs, which makes another variant of the same computation. Each round starts both variants anew
    and is judged by itself, so one round runs, and its figures, six times over, are as many as a winner needs.
    """
    words = ["-m", "runtime=cpu", "attn=native", "trainer.log_every=50,51", "data=fake", "data.batch_size=8"]
    words += ["data.num_classes=10", "trainer.max_steps=30", "trainer.warmup_steps=2", "trainer.eval_every=null"]
    words += ["checkpoints.every_epochs=null", "sweep.rounds=1", f"hydra.sweep.dir={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output, command = "", [sys.executable, str(ROOT / "train.py"), *words]
    with contextlib.ExitStack() as cleanup:
        sweep = cleanup.enter_context(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
        cleanup.callback(sweep.kill)
        for line in sweep.stdout:
            output += line
            if "done in" in line and "burn" not in locals():  # the first variant has trained alone
                burn = cleanup.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
                cleanup.callback(burn.kill)
        assert sweep.wait() == 0, output
    rows = json.loads((tmp_path / "comparison.json").read_text())
    record = json.loads((tmp_path / "rounds.json").read_text())
    assert len(record["rounds"]) == 1 and record["rounds"][0]["disturbed"], output
    assert rows[1]["judgement"] == "open" and "other processes used the CPU" in rows[1]["open_because"]
    assert "no winner between" in output and "no winner between" in (tmp_path / "comparison.md").read_text()
    judge(rows, {**record, "rounds": 6 * record["rounds"]})
    assert rows[1]["judgement"] == "open" and "0 of 6 rounds were undisturbed" in rows[1]["open_because"]
