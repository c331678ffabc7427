"""scripts/bench_scaling.py where there is no GPU, as its help says it can be tried."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bench_scaling.py"


def test_its_example_for_cpus(tmp_path):
    lines = SCRIPT.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if "--model vit_digits" in line)
    words = " ".join(lines[begin : begin + 2]).replace("\\", " ").split("anywhere")[0].split()
    assert words[:2] == ["python", "scripts/bench_scaling.py"] and "runtime=cpu" in words
    rows = tmp_path / "rows.jsonl"
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *words[2:], "--results", str(rows)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    measured = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["parallel"] for row in measured] == ["none", "none", "ddp", "fsdp"]
    assert [row["devices"] for row in measured] == [1, 1, 2, 2]
    assert all(row["step_time_ms"]["n"] == 8 for row in measured)
    assert "| none | 1 |" in ran.stdout and "| 100.0 % |" in ran.stdout
