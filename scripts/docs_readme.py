"""Write the figures of README.md and of the documentation from results/*.jsonl and from the backends themselves.

    python scripts/docs_readme.py                   # rewrite the marked sections and docs/_static/step_times.svg
    python scripts/docs_readme.py --check           # exit 1 if any is not up to date

A section is enclosed in <!-- begin NAME --> and <!-- end NAME -->; SECTIONS maps each name to a function.
"""

import argparse
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from reference_pages.attention import DEVICES, support_rows  # noqa: E402
from reference_pages.markdown import table  # noqa: E402

from vitkernels.benchmarks.tables import attention as attention_table  # noqa: E402
from vitkernels.benchmarks.tables import input as input_table  # noqa: E402
from vitkernels.benchmarks.tables import read_rows  # noqa: E402
from vitkernels.benchmarks.tables import step as step_table  # noqa: E402

PAGES = ("README.md", "docs/tutorials/compare_kernels.md", "docs/index.md")
CHART = ROOT / "docs/_static/step_times.svg"
# Numbers of runs in results/step.jsonl, attention.jsonl, scaling.jsonl and input.jsonl, which are append-only.
VIT_L, TRAIN_PY, SCALING, INPUT = 21, 22, 9, 4
BEST = "attn=auto best"
KERNELS = ("triton_flash", "pallas_flash")
ATTENTION = (133, 128)  # measurements with FlashAttention-4
EXTRAS = {"bias, masks, segments": 2, "dropout": 6}  # columns of support_rows after backend and device
BARS = (
    ("timm, torch.compile, SDPA", step_table.BASELINE),
    ("a timm model after accelerate(model)", "timm accelerate"),
    ("python train.py", "train.py"),
    ("python train.py speed=max", "train.py speed=max"),
)


def results(name: str) -> list[dict]:
    return read_rows(ROOT / "results" / f"{name}.jsonl")


def step_run(number: int) -> dict[str, dict]:
    """Return the rows of one run of scripts/bench_step.py by variant."""
    return {row["variant"]: row for row in step_table.split_runs(results("step"))[number - 1]}


# ------------------------------------------------------------------------------------------------------- sections


def support() -> str:
    """Return the support matrix of the attention backends, one row each."""
    rows: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, device, *figures in support_rows():
        rows.setdefault(name, {})[device] = tuple(figures)
    cells = []
    for name, devices in rows.items():
        places = [_on(devices, label) for label in DEVICES.values()]
        extras = [_where(devices, column) for column in EXTRAS.values()]
        cells.append((name, *places, _head_dims(devices), *extras))
    return table(("backend", *DEVICES.values(), "head dims", *EXTRAS), cells)


def _head_dims(devices: dict[str, tuple[str, ...]]) -> str:
    by_range: dict[str, list[str]] = {}
    for device, (_, head_dims, *_) in devices.items():
        by_range.setdefault(head_dims, []).append(device.partition(" (")[0])
    if len(by_range) == 1:
        return next(iter(by_range))
    return "; ".join(f"{head_dims} ({', '.join(names)})" for head_dims, names in by_range.items())


def _on(devices: dict[str, tuple[str, ...]], label: str) -> str:
    """Return the dtypes of a backend on the device with this label."""
    label = "NVIDIA Hopper" if label == "NVIDIA GPU" and label not in devices else label
    found = next((device for device in devices if device.startswith(label)), None)
    if found is None:
        return "–"
    note = "Hopper only" if found == "NVIDIA Hopper" else found.removeprefix(label).strip(" ()")
    return f"{devices[found][0]} ({note})" if note else devices[found][0]


def _where(devices: dict[str, tuple[str, ...]], column: int) -> str:
    """Return "yes", "no", or the devices on which a backend has the feature of this column."""
    having = [device for device, figures in devices.items() if figures[column] == "yes"]
    if len(having) in (0, len(devices)):
        return "yes" if having else "no"
    return " and ".join(device.partition(" (")[0] for device in having)


def verdict() -> str:
    """Return the verdict of the sweep in results/verdict.jsonl."""
    cells = []
    for row in results("verdict"):
        interval = row.get("speedup_interval")
        cells.append((
            row["variant"], f"{row['step_time_ms']:.2f}", f"{row['in_rounds_ms']:.2f}", f"{row['images_per_s']:.1f}",
            f"{100 * row['mfu']:.1f}", f"{row['peak_memory_MiB']}",
            f"{row['speedup']:.3f}" + (f" ({interval[0]:.3f}–{interval[1]:.3f})" if interval else ""),
        ))  # fmt: skip
    headings = ("variant", "step ms", "in rounds", "images/s", "MFU %", "peak memory MiB", "speedup")
    return table(headings, cells)


def measured() -> str:
    """Return the main results, each with the best peer measured in the same run."""
    cells = []
    for what, number, variant in (
        ("`python train.py` with default settings for speed, ViT-B/16 at 256 px, batch 128", TRAIN_PY, "train.py"),
        ("the same with `speed=max`: a bf16 residual stream", TRAIN_PY, "train.py speed=max"),
        ("training step, ViT-L/16 at 224 px, batch 128; ours with a bf16 residual stream", VIT_L, BEST),
    ):
        run = step_run(number)
        timm = run[step_table.BASELINE]["median"]
        cells.append(_against(what, "timm, compiled, SDPA", timm, run[variant]["median"], 1))
    cells += _input()
    measurements = attention_table.split_measurements(results("attention"))
    for number in ATTENTION:
        measurement = measurements[number - 1]
        times = {row["contender"]: row["device_both_ms"]["median"] for row in measurement if "device_both_ms" in row}
        peer = min((ms, name) for name, ms in times.items() if name.removesuffix(" again") not in KERNELS)
        shape = ", ".join(map(str, measurement[0]["shape_BHND"]))
        what = f"`pallas_flash`, forward + backward, ({shape})"
        cells.append(_against(what, peer[1], peer[0], times["pallas_flash"], 3))
    alone, two = _two_gpus()
    cells.append(("ddp on two H200s, ViT-B/16 at 256 px, batch 128 each", f"1 GPU: {alone:.1f} ms", f"{two:.1f} ms",
                  f"{100 * alone / two:.1f} % efficient"))  # fmt: skip
    return table(
        ("workload, in bf16 on one NVIDIA H200 unless stated otherwise", "best peer", "vitkernels", "ratio"), cells
    )


def _input() -> list[tuple[str, ...]]:
    """Return rows on JPEG files: the loader alone next to timm's, and training next to training without input."""
    rows = input_table.split_runs(results("input"))[INPUT - 1]
    rates = {row["pipeline"]: statistics.median(row["images_per_s"]) for row in rows}
    (width, height), cores = rows[0]["image"], rows[0]["cores"]
    cells = []
    for what, peer, pipeline in (
        (f"loader alone on an H100 with {cores} cores, JPEG files of {width} × {height}", input_table.TIMM,
         "imagefolder, decode=turbo"),
        ("training ViT-B/16 at 256 px on these files, `speed=max`", input_table.FAKE, "training, files"),
    ):  # fmt: skip
        name = peer.removeprefix("training, ")
        ratio = rates[pipeline] / rates[peer]
        factor = f"{100 * ratio:.0f} % of {name}" if peer == input_table.FAKE else f"{ratio:.2f} × faster"
        cells.append((what, f"{name}: {rates[peer]:,.0f} images/s", f"{rates[pipeline]:,.0f} images/s", factor))
    return cells


def _against(what: str, peer: str, before: float, after: float, digits: int) -> tuple[str, ...]:
    ratio = f"{before / after:.2f} × faster" if after <= before else f"{after / before:.2f} × slower"
    return what, f"{peer}: {before:.{digits}f} ms", f"{after:.{digits}f} ms", ratio


def _two_gpus() -> tuple[float, float]:
    """Return the median step of one GPU alone and of ddp (send=copy) on two, from the summary of the scaling page."""
    from vitkernels.benchmarks.tables import scaling

    _, alone, copied, *_ = scaling.split_runs(results("scaling"))[SCALING - 1]
    if (alone["devices"], copied["devices"], copied["parallel"]) != (1, 2, "ddp,send=copy"):
        raise ValueError(
            f"run {SCALING} of results/scaling.jsonl is another one: {alone['parallel']}, {copied['parallel']}"
        )
    return alone["step_time_ms"]["median"], copied["step_time_ms"]["median"]


SECTIONS: dict[str, Callable[[], str]] = {"support": support, "verdict": verdict, "measured": measured}


# ---------------------------------------------------------------------------------------------------------- chart


def write_chart(path: Path) -> None:
    """Draw the step times of ViT-B/16 with their 10th and 90th percentile."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run = step_run(TRAIN_PY)
    rows = [run[variant] for _, variant in BARS]
    baseline = run[step_table.BASELINE]["median"]
    settings = {"svg.fonttype": "none", "svg.hashsalt": "vitkernels", "font.family": "sans-serif", "font.size": 10}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
        colors = ["#b6bcc6" if label.startswith("timm,") else "#2563eb" for label, _ in BARS]
        medians = [row["median"] for row in rows]
        errors = [[row["median"] - row["p10"] for row in rows], [row["p90"] - row["median"] for row in rows]]
        places = range(len(BARS))
        axes.barh(places, medians, xerr=errors, color=colors, height=0.68, error_kw={"ecolor": "#374151", "lw": 1})
        for place, row in zip(places, rows, strict=True):
            text = f"{row['median']:.1f} ms  ({baseline / row['median']:.2f} ×)"
            axes.text(row["p90"] + 1.2, place, text, va="center", color="#111827")
        axes.set_yticks(places, [label for label, _ in BARS])
        axes.invert_yaxis()
        axes.set_xlim(0, 68)
        axes.set_xlabel("ms per training step: median, p10 to p90 (speedup over compiled timm)", loc="left")
        axes.set_title("ViT-B/16 at 256 px, batch 128, AdamW, bf16, one NVIDIA H200", loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None}, facecolor="white")
        plt.close(figure)


def chart_labels() -> list[str]:
    """Return the labels of the chart's bars, to check the committed file."""
    run = step_run(TRAIN_PY)
    return [f"{run[variant]['median']:.1f} ms" for _, variant in BARS]


# ----------------------------------------------------------------------------------------------------------- main


def rewritten(text: str) -> str:
    """Return the page with every marked section regenerated."""
    for name, section in SECTIONS.items():
        pattern = re.compile(rf"(<!-- begin {name}\b[^>]*-->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if pattern.search(text):
            content = section()
            text = pattern.sub(lambda found, content=content: f"{found[1]}{content}\n{found[2]}", text)
    return text


def outdated() -> list[str]:
    """Return the pages, and the chart, that are not up to date."""
    found = [page for page in PAGES if (ROOT / page).read_text() != rewritten((ROOT / page).read_text())]
    chart = CHART.read_text() if CHART.exists() else ""
    return found + ([str(CHART.relative_to(ROOT))] if any(label not in chart for label in chart_labels()) else [])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if anything is not up to date")
    if parser.parse_args(arguments).check:
        if found := outdated():
            sys.exit(f"outdated: {', '.join(found)}; run python scripts/docs_readme.py")
        return
    for page in PAGES:
        (ROOT / page).write_text(rewritten((ROOT / page).read_text()))
    write_chart(CHART)
    print(f"written: {', '.join(PAGES)}, {CHART.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
