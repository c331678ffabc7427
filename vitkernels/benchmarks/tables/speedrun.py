"""The page on the speed run, from results/speedrun.jsonl."""

from vitkernels.benchmarks.tables import markdown

TITLE = "Speed run"
_INTRODUCTION = (
    "Seconds of training until a model classifies the stated share of the held-out shapes correctly: the mean over "
    "seeds, all of which reached the target. Compilation and evaluations are not counted. To measure: "
    "`python scripts/speedrun.py`; the rules are in [the guide](../howto/speedrun.md)."
)
_HEADINGS = ("seconds", "per seed", "steps", "images per step", "device", "date, commit", "settings", "note")


def page(rows: list[dict]) -> str:
    """Return the page in Markdown: of each task and device, the runs that set a record, the newest first."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["image_size"], row["target"], row["val_items"], row["device"]), []).append(row)
    sections = []
    for (size, target, held_out, device), group in groups.items():
        heading = f"{target:g} % of {held_out} images of {size} px, {device}"
        sections.append((heading, markdown.table(_HEADINGS, [_cells(row) for row in records(group)[::-1]])))
    if not sections:
        sections = [("Records", "No run has been recorded yet.")]
    return markdown.page(TITLE, "speedrun.jsonl", _INTRODUCTION, sections)


def records(rows: list[dict]) -> list[dict]:
    """Return the rows that were faster than all before them, in order."""
    found: list[dict] = []
    for row in rows:
        if row["reached"] and (not found or row["mean_seconds"] < found[-1]["mean_seconds"]):
            found.append(row)
    return found


def _cells(row: dict) -> tuple[str, ...]:
    attempts = row["attempts"]
    return (
        f"{row['mean_seconds']:.2f}",
        ", ".join(f"{one['seconds']:.2f}" for one in attempts),
        ", ".join(str(one["steps"]) for one in attempts),
        str(row["images_per_step"]),
        row["device"],
        markdown.code(row),
        f"`{' '.join(row['settings'])}`" if row["settings"] else "experiment=speedrun",
        row.get("note") or markdown.MISSING,
    )
