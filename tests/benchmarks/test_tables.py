"""The benchmark pages: generated from results/*.jsonl, which every figure comes from."""

import importlib
import json
import random
import re
import statistics
from pathlib import Path

import pytest

from vitkernels.benchmarks import tables

ROOT = Path(__file__).resolve().parents[2]
MEASURED = re.compile(
    r"(_ms|_us|median|median_ms|p10|p90|mean|low|high|_bytes|bytes_per_second|_GiB|_seconds|losses|error|_share|medians_ms"
    r"|loss_against_bf16|images_per_s)$"
)


def page(name: str, rows: list[dict]) -> str:
    return importlib.import_module(f"vitkernels.benchmarks.tables.{name}").page(rows)


def rows_of(name: str) -> list[dict]:
    return tables.read_rows(ROOT / f"results/{name}.jsonl")


def perturbed(value, measured: bool, generator: random.Random):
    """Return the row with every measured value multiplied by a different random factor."""
    if isinstance(value, dict):
        return {key: perturbed(v, measured or bool(MEASURED.search(key)), generator) for key, v in value.items()}
    if isinstance(value, list):
        return [perturbed(v, measured, generator) for v in value]
    if measured and isinstance(value, (int, float)) and not isinstance(value, bool):
        return value * generator.uniform(1.5, 9.5)
    return value


# The page of the speed run has rows once a run was recorded; tests/benchmarks/test_speedrun.py checks its figures.
@pytest.mark.parametrize("name", [name for name in tables.NAMES if name != "speedrun"])
def test_page__every_figure_comes_from_the_results(name):
    """If the measurements change, every figure changes; a figure copied by hand would stay the same."""
    generator, rows = random.Random(0), rows_of(name)
    cells_of = lambda line: line.strip("| ").split(" | ")  # noqa: E731
    original = page(name, rows).splitlines()
    # Twice, because a ratio of two changed figures can be the same by chance.
    changed = [page(name, [perturbed(row, False, generator) for row in rows]).splitlines() for _ in range(2)]
    introduction = next(n for n, line in enumerate(original) if line.startswith("## "))
    same, total = set(), 0
    for before, *after in zip(*(lines[introduction:] for lines in (original, *changed)), strict=True):
        if not before.startswith("| ") or before.startswith("| loss up to step"):
            without_speed = {re.sub(r"copy moves [\d.]+", "", line) for line in (before, *after)}
            assert len(without_speed) == 1
            continue
        for old, *new in zip(*map(cells_of, (before, *after)), strict=True):
            if re.fullmatch(r"[+-]?\d+(\.\d+| \().*", old):
                total += 1
                same |= {old} if set(new) == {old} else set()
    assert total > 20
    assert same <= {"1.00", "1.000", "100.0 %"}  # ratios of a value to itself


def test_page__figures_are_rounded_values_of_the_rows():
    text = page("step", rows_of("step"))
    for row in rows_of("step"):
        assert f"{row['median']:.2f} ({row['p10']:.2f}, {row['p90']:.2f})" in text
    text = page("scaling", rows_of("scaling"))
    for row in rows_of("scaling"):
        assert f"{row['step_time_ms']['median']:.2f}" in text
    text = page("attention", rows_of("attention"))
    latest = {(row["gpu"], *row["shape_BHND"]): row for row in rows_of("attention")}
    for row in latest.values():
        assert f"{row['both_ms']['median']:.3f} [" in text
    text = page("tpu_attention", rows_of("tpu_attention"))
    for row in rows_of("tpu_attention"):
        assert f"| {row['estimate_ms']:.3f} |" in text
    text = page("input", rows_of("input"))
    for row in rows_of("input"):
        rates = row["images_per_s"]
        assert f"| {statistics.median(rates):.0f} ({min(rates):.0f}, {max(rates):.0f}) | {len(rates)} |" in text


def test_input_page__relates_pipelines_within_their_run():
    """A run ends where the settings change or a pipeline repeats; rows of early runs have no settings."""

    def rows(pipelines: dict[str, list[float]], **more) -> list[dict]:
        common = rows_of("input")[0] | more
        return [common | {"pipeline": name, "images_per_s": rates} for name, rates in pipelines.items()]

    loaders = {"imagefolder": [300.0, 100.0, 200.0], "timm's create_loader": [100.0]}
    training = {"training, data=fake": [400.0], "training, files": [100.0], "evaluation of the files": [50.0]}
    early = {"training, files": [7.0], "imagefolder": [8.0]}
    chosen = ["model=vit_b16_256", "speed=max"]
    text = page("input", [*rows(early), *rows(early), *rows({**loaders, **training}, settings=chosen)])
    first, second, third = text.split("\n## Run ")[1:]
    for run in (first, second):
        assert "| training, files | 7 (7, 7) | 1 | – | – |" in run and "| imagefolder | 8 (8, 8) | 1 | – | – |" in run
        assert "training with" not in run
    assert "training with `model=vit_b16_256 speed=max`" in third
    assert third.splitlines()[6:] == [
        "| imagefolder | 200 (100, 300) | 3 | 2.00 | – |",
        "| timm's create_loader | 100 (100, 100) | 1 | 1.00 | – |",
        "| training, data=fake | 400 (400, 400) | 1 | – | 100.0 % |",
        "| training, files | 100 (100, 100) | 1 | – | 25.0 % |",
        "| evaluation of the files | 50 (50, 50) | 1 | – | – |",
    ]


def test_write_pages__committed_pages_are_current(tmp_path):
    for path in tables.write_pages(ROOT / "results", tmp_path):
        assert path.read_text() == (ROOT / "docs/benchmarks" / path.name).read_text(), (
            f"{path.name} is outdated: python scripts/docs_benchmarks.py"
        )


def test_write_pages__failed_measurements_keep_their_row(tmp_path):
    for name in tables.NAMES:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(name)))
    failed = {"shape_BHND": [1, 2, 3, 4], "dtype": "bfloat16", "contender": "sdpa cudnn", "error": "No | kernel"}
    row = rows_of("attention")[0]
    with (tmp_path / "attention.jsonl").open("a") as file:
        file.write(json.dumps({key: row[key] for key in ("gpu", "torch", "triton", "date")} | failed) + "\n")
    tables.write_pages(tmp_path, tmp_path / "pages")
    assert "| sdpa cudnn | – | – | – | – | – | – | – | No / kernel |" in (tmp_path / "pages/attention.md").read_text()
