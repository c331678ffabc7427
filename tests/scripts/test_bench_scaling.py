"""scripts/bench_scaling.py on CPUs, with the example of its help, and its table."""

import json
from pathlib import Path

import forked
import pytest

from vitkernels.benchmarks import scaling

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bench_scaling.py"


def test_main__example_for_cpus(tmp_path):
    lines = SCRIPT.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if "--model vit_digits" in line)
    words = " ".join(lines[begin : begin + 2]).replace("\\", " ").split("anywhere")[0].split()
    assert words[:2] == ["python", "scripts/bench_scaling.py"] and "runtime=cpu" in words
    rows = tmp_path / "rows.jsonl"
    ran = forked.run([SCRIPT, *words[2:], "--results", rows])
    assert ran.returncode == 0, ran.stderr[-3000:]
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["parallel"] for row in measured] == ["none", "none", "ddp", "fsdp"]
    assert [row["devices"] for row in measured] == [1, 1, 2, 2]
    assert all(row["step_time_ms"]["n"] == 8 for row in measured)
    assert "| none | 1 |" in ran.stdout and "| 100.0 % |" in ran.stdout


def test_table__efficiency_relative_to_one_device_alone():
    def row(parallel, devices, median, alone=True):
        times = {"median": median, "p10": median, "p90": median, "mean": median + 1}
        row = {"parallel": parallel, "devices": devices, "alone": alone, "step_time_ms": times}
        return row | {"medians_ms": [median, 55.0], "peak_memory_bytes": 2**30}

    rows = [row("none", 1, 40.0, alone=False), row("none", 1, 50.0), row("ddp", 4, 62.5)]
    busy, alone, several = scaling.table(rows, batch=100).splitlines()[2:]
    assert busy == "| none | 1, others busy; the slowest 55.00 | 40.00 (40.00, 40.00) | 41.00 | 2500 | 1.0 | 125.0 % |"
    assert alone == "| none | 1 | 50.00 (50.00, 50.00) | 51.00 | 2000 | 1.0 | 100.0 % |"
    assert several == "| ddp | 4 | 62.50 (62.50, 62.50) | 63.50 | 6400 | 1.0 | 80.0 % |"
