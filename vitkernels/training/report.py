"""Write a run's page, one HTML file: curves, results, the split of step time, settings and command."""

import base64
import html
import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from vitkernels.config.saved import read_settings
from vitkernels.errors import UsageError
from vitkernels.files import read_json
from vitkernels.training.step_timer import PARTS

_WIDTH, _HEIGHT, _MARGIN = 460, 220, 60
_MOST_POINTS = 600  # of a curve; more are averaged
# Of the last evaluation, by the names of their files.
PICTURES = {
    "predictions": "Predictions on a sample of the evaluation images",
    "mistakes": "The most confident mistakes",
    "confusion": "Confusion matrix",
}
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}table{border-collapse:collapse}td,th{padding:.2em .8em .2em 0;
text-align:left;vertical-align:top}pre{background:#f5f5f5;padding:.8em;overflow:auto}svg{margin-right:1em}
.bar{display:flex;height:1.6em;max-width:700px}.bar div{color:#fff;overflow:hidden;text-indent:.4em;white-space:nowrap}
img{max-width:100%}h3{font-size:1em}"""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write `folder`/report.html, or `out`, and return its path; the page refers to no other file and no network.

    Raises UsageError ("report.no_run") if the folder holds neither steps nor a summary.
    """
    steps, evaluations = read_metrics(folder)
    summary = read_json(folder / "summary.json") or {}
    if not steps and not summary:
        message = f"{folder} is not the folder of a run: it has neither metrics.jsonl nor summary.json"
        raise UsageError(message, code="report.no_run", folder=str(folder))
    path = folder / "report.html" if out is None else out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(folder, steps, evaluations, summary))
    return path


def read_metrics(folder: Path) -> tuple[list[dict], list[dict]]:
    """Return the lines of metrics.jsonl: those of steps, and those of evaluations; a torn last line is left out."""
    file = folder / "metrics.jsonl"
    lines = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in lines if "loss" in line], [line for line in lines if "loss" not in line]


def page(folder: Path, steps: Sequence[dict], evaluations: Sequence[dict], summary: dict[str, Any]) -> str:
    """Return the HTML of the page."""
    parts = [
        f"<h1>{html.escape(folder.resolve().name)}</h1>",
        f"<p>{html.escape(_headline(summary, steps))}</p>",
        "<h2>Curves</h2>",
        *_curves(steps, evaluations),
        *_results(folder, summary),
        *_time_split(summary),
        *_examples(folder),
        *_repeat(folder, summary),
        "<h2>Settings</h2>",
        f"<pre>{html.escape(yaml.safe_dump(read_settings(folder), sort_keys=False))}</pre>",
    ]
    title = html.escape(f"{summary.get('model', 'run')}: {folder.resolve().name}")
    head = f"<meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def _headline(summary: dict[str, Any], steps: Sequence[dict]) -> str:
    if summary.get("status") == "done":
        return (
            f"{summary['model']}, attention {summary['attn']}, ops {summary['ops']}, {summary['precision']} on "
            f"{summary['devices']} × {summary['device']}; {summary['steps']} steps of {summary['batch_size']} images "
            f"in {summary['seconds']:.0f} s."
        )
    last = f"the last of its {len(steps)} steps in metrics.jsonl is {steps[-1]['step']}" if steps else "it took no step"
    return f"This run is not complete: {summary.get('reason') or 'it has no summary'}; {last}."


def _curves(steps: Sequence[dict], evaluations: Sequence[dict]) -> list[str]:
    charts = []
    for name, title in (("loss", "Training loss"), ("lr", "Learning rate"), ("grad_norm", "Gradient norm")):
        charts.append(curve(title, [(line["step"], line[name]) for line in steps if name in line]))
    for name, title in (("val_top1", "Top-1 accuracy, %"), ("val_loss", "Evaluation loss")):
        charts.append(curve(title, [(line["step"], line[name]) for line in evaluations if name in line], dots=True))
    return [chart for chart in charts if chart]


def curve(title: str, points: Sequence[tuple[float, float]], dots: bool = False) -> str:
    """Return an inline SVG of the points, with the ends of both axes; "" without a finite point."""
    points = _averaged([(x, y) for x, y in points if math.isfinite(y)])
    if not points:
        return ""
    (x0, x1), (y0, y1) = ((min(values), max(values)) for values in zip(*points, strict=True))
    x_span, y_span = (x1 - x0) or 1.0, (y1 - y0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        right, down = (x - x0) / x_span, 1 - (y - y0) / y_span
        return _MARGIN + right * (_WIDTH - _MARGIN - 10), 26 + down * (_HEIGHT - 50)

    places = [at(x, y) for x, y in points]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    marks = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#1f77b4"/>' for x, y in places) if dots else ""
    left, bottom = _MARGIN, _HEIGHT - 24
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{html.escape(title)}" font-size="11">'
        f'<text x="{left}" y="14" font-size="13">{html.escape(title)}</text>'
        f'<path d="M{left},26 V{bottom} H{_WIDTH - 10}" fill="none" stroke="#999"/>'
        f'<text x="{left - 4}" y="32" text-anchor="end">{y1:.3g}</text>'
        f'<text x="{left - 4}" y="{bottom}" text-anchor="end">{y0:.3g}</text>'
        f'<text x="{left}" y="{_HEIGHT - 8}">step {x0:g}</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 8}" text-anchor="end">{x1:g}</text>'
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.3"/>{marks}</svg>'
    )


def _averaged(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most _MOST_POINTS points: means over equal spans of points."""
    span = math.ceil(len(points) / _MOST_POINTS) or 1
    groups = [points[i : i + span] for i in range(0, len(points), span)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _results(folder: Path, summary: dict[str, Any]) -> list[str]:
    if summary.get("status") != "done":
        return []
    names = read_json(folder / "class_names.json")
    figures = {"top-1": summary["val_top1"], "top-5": summary["val_top5"]}
    if names and len(names) <= 5:
        del figures["top-5"]
    times = summary["step_time_ms"]
    memory = summary["peak_memory_bytes"]
    rows = {
        f"{', '.join(figures)} at the end": _percent(*figures.values()),
        "best top-1": summary["best"] and f"{summary['best']['top1']:.2f} % at step {summary['best']['step']}",
        "loss, mean of the last steps": _number(summary["train_loss"], "{:.4f}"),
        "step time": times["n"]
        and "{median:.2f} ms median, {p10:.2f} p10, {p90:.2f} p90, over {n} steps".format(**times),
        "images per second": _number(summary["images_per_s"], "{:.1f}"),
        "MFU": _number(summary["mfu"] and 100 * summary["mfu"], "{:.1f} %"),
        "peak memory": _number(memory and memory / 2**20, "{:.0f} MiB"),
        "interpreted kernels": ", ".join(summary.get("interpreted") or ()) or None,
    }
    return ["<h2>Results</h2>", _table({name: text for name, text in rows.items() if text})]


def _percent(*values: float | None) -> str | None:
    return None if None in values else ", ".join(f"{value:.2f} %" for value in values)


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _time_split(summary: dict[str, Any]) -> list[str]:
    """Return a bar of the mean step: the device's computing time and its waits."""
    mean = (summary.get("step_time_ms") or {}).get("mean")
    parts: dict[str, float] = {name: summary[name] for name in PARTS if summary.get(name) is not None}
    if not mean or "input_wait_ms" not in parts:
        return []
    if len(parts) < len(PARTS):  # an older run, or a device that cannot tell
        parts = {"input_wait_ms": parts["input_wait_ms"], "rest_ms": max(0.0, mean - parts["input_wait_ms"])}
    names = {"input_wait_ms": "input", "host_late_ms": "host", "device_busy_ms": "device", "rest_ms": "rest"}
    colors = {"input_wait_ms": "#ff7f0e", "host_late_ms": "#d62728", "device_busy_ms": "#1f77b4", "rest_ms": "#7f7f7f"}
    bar = "".join(
        f'<div style="background:{colors[name]};width:{100 * ms / mean:.1f}%">'
        f"{f'{names[name]} {ms:.2f} ms' if ms > 0.2 * mean else ''}</div>"
        for name, ms in parts.items()
        if ms > 0
    )
    late = summary.get("host_bound")
    text = "" if late is None else f" The device waited for kernel launches in {100 * late:.0f} % of the steps."
    shares = ", ".join(
        f'<span style="color:{colors[name]}">■</span> {names[name]} {ms:.2f} ms ({100 * ms / mean:.1f} %)'
        for name, ms in parts.items()
    )
    return ["<h2>Time of a step</h2>", f"<div class=bar>{bar}</div>", f"<p>Mean {mean:.2f} ms: {shares}.{text}</p>"]


def _examples(folder: Path) -> list[str]:
    """Return the pictures of the last evaluation, in the page itself."""
    parts = []
    for name, title in PICTURES.items():
        path = folder / f"{name}.png"
        if path.exists():
            content = base64.b64encode(path.read_bytes()).decode()
            parts.append(f"<h3>{title}</h3><img src='data:image/png;base64,{content}' alt='{title}'>")
    return ["<h2>Examples</h2>", *parts] if parts else []


def _repeat(folder: Path, summary: dict[str, Any]) -> list[str]:
    command = (read_json(folder / "command.json") or {}).get("command")
    versions = {name: version for name, version in (summary.get("versions") or {}).items() if version}
    # The folder exists now, and a run starts in a new one.
    words = [word for word in shlex.split(command or "") if not word.startswith("hydra.run.dir=")]
    parts = ["<h2>How to repeat it</h2>"]
    if words:
        parts.append(f"<pre>{html.escape(shlex.join(words))}</pre>")
    commit = summary.get("git_commit")
    parts += [f"<p>Commit {html.escape(commit)}.</p>"] if commit else []
    return [*parts, _table(versions)] if versions else parts


def _table(rows: dict[str, Any]) -> str:
    cells = (f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(text))}</td></tr>" for name, text in rows.items())
    return f"<table>{''.join(cells)}</table>"
