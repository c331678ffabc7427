"""The verdict of a sweep: its table, and the caveats that prevent wrong conclusions."""

import json
import math
from statistics import geometric_mean

import pytest
from expecting import error
from pytest import approx

from vitkernels.cli import main as console
from vitkernels.sweep import verdict
from vitkernels.sweep.caveats import find_caveats
from vitkernels.sweep.plot import draw_chart
from vitkernels.sweep.statistics import ratio_interval


def job(folder, num, variant, status="done", reason=None, **summary):
    """Write a finished job as a sweep leaves it: 10 images per step, `steps` timed steps of `median` ms each."""
    path = folder / variant
    path.mkdir(parents=True)
    card = {"num": num, "variant": variant, "overrides": [*variant.split(","), "data=fake"]}
    if "code" in summary:
        card["circumstances"] = {"code": summary.pop("code")}
    (path / "job.json").write_text(json.dumps({**card, "status": status, "reason": reason}))
    if summary:
        median = summary.pop("median")
        times = {"median": median, "p10": 9.0, "p90": 99.0, "mean": summary.pop("mean", median)}
        times["n"] = summary.pop("steps", 190)
        defaults = {"runtime": "cuda", "attn": "native", "machine": {"cores": 2, "other_cores": 0.0}}
        defaults |= {"mfu": None, "input_wait_ms": 0.5, "peak_memory_bytes": 2**30, "batch_size": 10, "model": "vit"}
        defaults |= {"device": "X", "devices": 1, "precision": "bf16", "quant": "none", "git_commit": "abc"}
        defaults |= {"train_flops_per_step": 1e9 * summary.get("batch_size", 10), "train_loss": 1.0}
        content = {"status": "done", "step_time_ms": times, "images_per_s": 1e4 / times["mean"]}
        (path / "summary.json").write_text(json.dumps({**content, **defaults, **summary}))


def test_compare__ratios_and_outputs(tmp_path, capsys):
    job(tmp_path, 1, "attn=b", median=20.0, mfu=0.5)
    job(tmp_path, 0, "attn=a", median=40.0)
    job(tmp_path, 2, "attn=c", status="failed", reason="out of memory")
    rows = verdict.compare(tmp_path)
    assert [(r["variant"], r["ratio"]) for r in rows] == [("attn=a", 1.0), ("attn=b", 2.0), ("attn=c", None)]
    verdict.write(rows, tmp_path)
    verdict.show(rows, tmp_path)
    text = (tmp_path / "comparison.md").read_text()
    assert "| attn=b | 20.00 (9.00, 99.00) | 500.0 | 50.0 | 0.50 | 1024 | 1.0000 | 2.000 ? |" in text
    assert "**attn=c** failed: out of memory" in text
    assert "attn=c failed: out of memory" in capsys.readouterr().out
    assert json.loads((tmp_path / "comparison.json").read_text()) == rows
    assert (tmp_path / "comparison.png").stat().st_size > 5000


def test_compare__evaluations(tmp_path, capsys):
    for num, (variant, top1) in enumerate({"quant=w8a8": 91.25, "quant=w4a16": 90.0}.items()):
        job(tmp_path, num, variant)
        card = {
            "quant": variant,
            "model": f"of {variant}",
            "top1": top1,
            "loss": 0.5,
            "images_per_s": 200.0,
            "bytes": (8 - num) * 10**6,
        }
        (tmp_path / variant / "eval.json").write_text(json.dumps(card))
    rows = verdict.compare(tmp_path)
    verdict.write(rows, tmp_path)
    verdict.show(rows, tmp_path)
    assert [row["val_top1"] for row in rows] == [91.25, 90.0]
    text = (tmp_path / "comparison.md").read_text()
    assert text.splitlines()[0] == "| variant | images/s | weights MB | val top-1 % |"
    assert "| quant=w4a16 | 200.0 | 7.00 | 90.00 |" in text and "speedup" not in text + capsys.readouterr().out


def test_compare__training_takes_precedence_over_evaluation(tmp_path):
    job(tmp_path, 0, "attn=a", median=40.0, val_top1=70.0)
    (tmp_path / "attn=a/eval.json").write_text(json.dumps({"top1": 60.0, "images_per_s": 1.0, "bytes": 1}))
    (row,) = verdict.compare(tmp_path)
    assert (row["ratio"], row["val_top1"], row["images_per_s"]) == (1.0, 70.0, 250.0)


def test_write__all_variants_failed(tmp_path):
    job(tmp_path, 0, "attn=a", status="failed", reason="killed by SIGSEGV")
    rows = verdict.compare(tmp_path)
    verdict.write(rows, tmp_path)
    assert rows[0]["ratio"] is None and "killed by SIGSEGV" in (tmp_path / "comparison.md").read_text()


def test_compare__no_ratios_if_first_variant_failed(tmp_path):
    job(tmp_path, 0, "attn=a", status="failed", reason="out of memory")
    job(tmp_path, 1, "attn=b", median=20.0)
    rows = verdict.compare(tmp_path)
    verdict.write(rows, tmp_path)
    assert [row["ratio"] for row in rows] == [None, None]
    assert (tmp_path / "comparison.png").stat().st_size > 5000


def test_find_caveats__single_runs_only(tmp_path):
    for num, variant in enumerate(("attn=a", "attn=b")):
        job(tmp_path, num, variant, median=40.0)
    rows = verdict.compare(tmp_path)
    (caveat,) = find_caveats(rows)
    assert caveat.startswith("each variant ran once") and "seed=0,1,2" in caveat
    assert f"- {caveat}\n" in verdict.markdown(rows) and "medians of repeats" not in verdict.markdown(rows)
    assert find_caveats(rows[:1]) == [] and find_caveats([]) == []


def test_compare__ratio_is_per_image(tmp_path):
    job(tmp_path, 0, "data.batch_size=32", median=40.0, batch_size=32)
    job(tmp_path, 1, "data.batch_size=8", median=16.0, batch_size=8)
    rows = verdict.compare(tmp_path)
    assert [row["images_per_s"] for row in rows] == [800.0, 500.0]
    assert rows[1]["ratio"] == 0.625  # a step takes less time, an image more
    assert "time per image" in verdict.markdown(rows)
    (axes,) = draw_chart(rows).axes
    assert [bar.get_width() for bar in axes.patches] == [1250.0, 2000.0] and "per image in µs" in axes.get_xlabel()


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"model": "vit_l"}, "the model is vit_l here and vit in a=1"),
        ({"train_flops_per_step": 2e10}, "the work per image is 2 GFLOP here and 1 GFLOP in a=1"),
        ({"device": "Y"}, "the device is Y here and X in a=1"),
        ({"devices": 2}, "the number of devices is 2 here and 1 in a=1"),
        ({"precision": "fp32"}, "the precision is fp32 here and bf16 in a=1"),
    ],
)
def test_compare__no_ratio_if_incomparable(tmp_path, differs, said):
    job(tmp_path, 0, "a=1", median=40.0)
    job(tmp_path, 1, "a=2", median=20.0, **differs)
    job(tmp_path, 2, "a=3", median=20.0)
    rows = verdict.compare(tmp_path)
    assert [row["ratio"] for row in rows] == [1.0, None, 2.0]
    assert f"a=2: no speedup, because {said}" in find_caveats(rows)


def test_incomparable__tolerates_rounding_of_work_per_image(tmp_path):
    job(tmp_path, 0, "a=1", median=40.0, train_flops_per_step=1e10 / 3)
    job(tmp_path, 1, "a=2", median=20.0, batch_size=7, train_flops_per_step=7e9 / 3 + 1e-6)
    assert verdict.compare(tmp_path)[1]["ratio"] == 1.4


def test_compare__repeats_merge_with_interval(tmp_path):
    times = {"a": (40.0, 39.6, 41.0), "b": (39.8, 40.6, 39.2), "c": (20.0, 20.2, 19.9)}
    for num, (seed, attn) in enumerate((seed, attn) for seed in range(3) for attn in times):
        job(tmp_path, num, f"attn={attn},seed={seed}", median=times[attn][seed], val_top1=90.0 + seed, mfu=0.5)
    rows = verdict.compare(tmp_path)
    assert [row["variant"] for row in rows] == ["attn=a ×3", "attn=b ×3", "attn=c ×3"]
    means = [geometric_mean(times[attn]) for attn in "abc"]  # the centre of the interval on a logarithmic scale
    assert [row["step_time_ms"]["median"] for row in rows] == approx(means)
    assert [row["ratio"] for row in rows] == approx([means[0] / one for one in means], abs=1e-4)
    low, high = rows[1]["ratio_interval"]
    assert low < 1 < high and rows[0]["ratio_interval"] is None
    assert 1.9 < rows[2]["ratio_interval"][0] < 2 < rows[2]["ratio_interval"][1] < 2.1
    table = verdict.markdown(rows)
    assert (
        f"| 39.20 to 40.60 | 250.9 | 49.9 | 0.50 | 1024 | 1.0000 ± 0.0000 | 91.00 ± 1.00 | 1.008 ({low:.3f}, " in table
    )
    assert ") ~ |" in table.splitlines()[3] and "~" not in table.splitlines()[4]
    assert "95 % confidence interval" in table
    assert find_caveats(rows) == []  # the variants took turns
    (axes,) = draw_chart(rows).axes
    assert [bar.get_width() for bar in axes.patches] == [row["step_time_ms"]["median"] for row in rows]
    assert [list(dots.get_xdata()) for dots in axes.lines if dots.get_marker() == "o"] == [
        list(times[a]) for a in "abc"
    ]
    assert [one["judgement"] for one in rows] == [None, "level", "faster"]
    said = [text.get_text() for text in axes.texts]
    assert "×1.01" in said[1] and said[1].endswith("no difference shown") and said[2].endswith("2.07)")


def test_ratio_interval__is_students_t(tmp_path):
    """Two and two runs: t is 4.30 for two degrees of freedom; the logarithms of each pair differ by 0.02."""

    def row(*medians):
        return {"repeats": [{"repeats": None, "step_time_ms": {"median": median}} for median in medians]}

    half = 4.30 * math.sqrt((4 * 0.01**2) / 2 * (1 / 2 + 1 / 2))
    low, high = ratio_interval(1.0, row(math.exp(0.99), math.exp(1.01)), row(math.exp(1.99), math.exp(2.01)))
    assert (low, high) == (approx(math.exp(-half), abs=1e-4), approx(math.exp(half), abs=1e-4))
    assert ratio_interval(1.0, row(2.0), row(3.0)) is None


def test_find_caveats__repeats_back_to_back(tmp_path):
    for num, (attn, seed) in enumerate((attn, seed) for attn in "ab" for seed in range(2)):
        job(tmp_path, num, f"attn={attn},seed={seed}", median=40.0 + num)
    rows = verdict.compare(tmp_path)
    (caveat,) = find_caveats(rows)
    assert "back to back" in caveat
    assert rows[0]["images_per_s"] == pytest.approx(10 / rows[0]["step_time_ms"]["median"] * 1e3)
    verdict.write(rows, tmp_path)
    assert json.loads((tmp_path / "comparison.json").read_text()) == rows


def test_compare__failed_or_different_device_repeat_has_its_own_row(tmp_path):
    job(tmp_path, 0, "seed=0", median=40.0)
    job(tmp_path, 1, "seed=1", median=41.0)
    job(tmp_path, 2, "seed=2", status="failed", reason="out of memory")
    job(tmp_path, 3, "seed=3", status="failed", reason="killed")
    job(tmp_path, 4, "seed=4", median=20.0, device="Y")
    rows = verdict.compare(tmp_path)
    assert [(row["variant"], row["reason"]) for row in rows] == [
        ("seed ×2", None),
        ("seed=4", None),
        ("seed=2", "out of memory"),
        ("seed=3", "killed"),
    ]
    assert len(rows[0]["repeats"]) == 2 and rows[1]["ratio"] is None


def test_compare__repeats_of_failed_first_run_are_the_baseline(tmp_path):
    job(tmp_path, 0, "seed=0,attn=a", status="failed", reason="killed")
    for num, (seed, attn) in enumerate(((0, "b"), (1, "a"), (1, "b"), (2, "a")), start=1):
        job(tmp_path, num, f"seed={seed},attn={attn}", median=40.0 if attn == "a" else 20.0)
    rows = verdict.compare(tmp_path)
    found = [(row["variant"], row["ratio"]) for row in rows]
    assert found == [("attn=a ×2", 1.0), ("seed=0,attn=a", None), ("attn=b ×2", 2.0)]


def test_compare__repeat_without_timed_steps_is_ignored(tmp_path):
    """A run that was resumed shortly before its end times no step."""
    for num, attn in enumerate("ab"):
        job(tmp_path, num, f"++seed=0,attn={attn}", median=None, mean=40.0, steps=0)
        for seed in (1, 2):
            job(tmp_path, 2 * seed + num, f"++seed={seed},attn={attn}", median=40.0, mfu=0.5)
    rows = verdict.compare(tmp_path)
    assert [(row["variant"], row["ratio"]) for row in rows] == [("attn=a ×3", 1.0), ("attn=b ×3", 1.0)]
    assert [(row["images_per_s"], row["mfu"]) for row in rows] == [(approx(250.0), approx(0.5))] * 2
    assert find_caveats(rows)[0] == "++seed=0,attn=a, ++seed=0,attn=b: no step was timed"


def test_find_caveats__few_timed_steps_message(tmp_path):
    steps = {"a": 100, "b": 49, "c": 50, "d": 6, "e": 0}
    for num, (attn, n) in enumerate(steps.items()):
        job(tmp_path, num, f"attn={attn}", median=40.0 if n else None, steps=n, mean=40.0)
    rows = verdict.compare(tmp_path)
    assert [row["ratio"] for row in rows] == [1.0, 1.0, 1.0, None, None]
    assert find_caveats(rows)[:-1] == [
        "attn=d: only 6 timed steps, a speedup needs 20",
        "attn=b: only 49 timed steps",
    ]


def test_compare__no_ratio_with_fewer_than_twenty_steps(tmp_path):
    for num, n in enumerate((20, 19, 19)):
        job(tmp_path, num, f"attn={num}", median=40.0, steps=n)
    rows = verdict.compare(tmp_path)
    assert find_caveats(rows)[0] == "attn=1, attn=2: only 19 timed steps, a speedup needs 20"
    assert [row["ratio"] for row in rows] == [1.0, None, None]


def test_find_caveats__stalls_are_reported_and_figures_use_the_median(tmp_path):
    job(tmp_path, 0, "attn=a", median=100.0, mean=104.0, mfu=0.5)
    job(tmp_path, 1, "attn=b", median=72.0, mean=104.4, mfu=0.5)
    rows = verdict.compare(tmp_path)
    first, second = rows
    assert second["images_per_s"] / first["images_per_s"] == pytest.approx(second["ratio"], rel=1e-3)
    assert (first["images_per_s"], first["mfu"]) == (100.0, 0.52)
    assert find_caveats(rows)[0].startswith("attn=b: mean step 104.4 ms, 45 % above the median")
    assert not any(caveat.startswith("attn=a") for caveat in find_caveats(rows))


def test_find_caveats__different_or_uncommitted_code_message(tmp_path):
    job(tmp_path, 0, "attn=a", median=40.0)
    job(tmp_path, 1, "attn=b", median=40.0, git_commit="abc-dirty.1f2e")
    rows = verdict.compare(tmp_path)
    assert (
        find_caveats(rows)[0]
        == "the variants ran different code: attn=a at commit abc; attn=b at commit abc-dirty.1f2e"
    )
    assert find_caveats(rows[1:]) == ["measured with uncommitted changes: abc-dirty.1f2e"]


def test_find_caveats__commit_stands_in_for_unknown_code(tmp_path):
    job(tmp_path, 0, "attn=a", median=40.0)
    job(tmp_path, 1, "attn=b", median=40.0, code="1f2e")
    assert not any("different code" in caveat for caveat in find_caveats(verdict.compare(tmp_path)))


def test_find_caveats__repeated_evaluations_need_no_steps(tmp_path):
    for seed in range(2):
        job(tmp_path, seed, f"seed={seed}")
        (tmp_path / f"seed={seed}/eval.json").write_text(json.dumps({"top1": 90.0, "images_per_s": 1.0}))
    assert not any("timed" in caveat for caveat in find_caveats(verdict.compare(tmp_path)))


def test_compare__commits_with_equal_code_merge(tmp_path):
    for seed, commit in enumerate(("abc", "def")):
        job(tmp_path, seed, f"seed={seed}", median=40.0, git_commit=commit, code="1f2e")
    (row,) = verdict.compare(tmp_path)
    assert row["variant"] == "seed ×2" and find_caveats([row]) == []


def test_find_caveats__row_caveats_message(tmp_path):
    job(tmp_path, 0, "quant=none", median=40.0, mfu=0.5)
    job(tmp_path, 1, "quant=fp8", median=40.0, mfu=0.5, quant="fp8", host_bound=0.75, parameters_without_gradient=2)
    caveats = find_caveats(verdict.compare(tmp_path))
    assert "quant=fp8: MFU is relative to the bf16 peak; the chip's 8-bit peak is higher" in caveats
    assert any(caveat.startswith("quant=fp8: host-bound in 75 % of the steps") for caveat in caveats)
    assert "quant=fp8: 2 parameters received no gradient" in caveats
    assert not any(caveat.startswith("quant=none") for caveat in caveats)


def test_compare__interpreted_kernels_get_no_ratio(tmp_path, capsys):
    """Runs of older versions do not record it; then the backend and the runtime say so."""
    job(tmp_path, 0, "attn=native", median=40.0, runtime="cpu")
    job(tmp_path, 1, "attn=mine", median=4000.0, interpreted=["Pallas interpret mode"], runtime="cpu")
    job(tmp_path, 2, "attn=triton_flash", median=20.0, runtime="cpu", attn="triton_flash")
    job(tmp_path, 3, "attn=sdpa", median=20.0, runtime="cpu", attn="sdpa")
    rows = verdict.compare(tmp_path)
    assert [row["ratio"] for row in rows] == [1.0, None, None, 2.0]
    assert rows[2]["interpreted"] == ["Triton's interpreter"]
    table = verdict.markdown(rows).splitlines()
    assert table[3].endswith("| interpreted |") and table[4].endswith("| interpreted |")
    assert "attn=mine: no speedup, because kernels ran interpreted here (Pallas interpret mode)" in "".join(table)
    (axes,) = draw_chart(rows).axes
    assert "interpreted: no speedup" in axes.texts[1].get_text() and "×" not in axes.texts[1].get_text()
    assert axes.get_xlim()[1] < 100  # the interpreted bar, a hundred times as long, does not set the scale


def test_draw_chart__names_what_was_measured_and_carries_the_caveats(tmp_path):
    job(tmp_path, 0, "attn=a", median=40.0)
    job(tmp_path, 1, "attn=b", median=20.0)
    rows = verdict.compare(tmp_path)
    chart = draw_chart(rows)
    title, notes = chart.axes[0].get_title(loc="left"), chart.get_supxlabel()
    assert title.startswith("vit, 10 images/step, bf16, X, 20") and rows[0]["finished"][:10] in title
    assert "no winner between attn=a and attn=b" in notes and "each variant ran once" in notes


def test_draw_chart__counts_caveats_that_do_not_fit(tmp_path):
    for num in range(20):
        job(tmp_path, num, f"attn={num}", median=40.0, mean=400.0 + num)
    notes = draw_chart(verdict.compare(tmp_path)).get_supxlabel().splitlines()
    assert len(notes) < 12 and "more lines in comparison.md" in notes[-1]


def test_find_caveats__runs_that_contradict_the_rounds(tmp_path):
    """A machine that was busy during the first run made the second one look 3.4 times as fast."""
    job(tmp_path, 0, "attn=a", median=68.0)
    job(tmp_path, 1, "attn=b", median=20.0)
    turn = {"n": 10, "input_wait_ms": 0.0, "cpu_share": 1.0, "gpu": None}
    lap = {"cores": 2, "other_cores": 0.01, "cpu_mhz": 2000.0, "load_1min": 1.0}
    rounds = [
        {
            "turns": [
                {"variant": "attn=a", "step_ms": 20.0 + i, **turn},
                {"variant": "attn=b", "step_ms": 21.0, **turn},
            ],
            "machine": [lap, lap],
            "disturbed": [],
        }
        for i in range(8)
    ]
    rows = verdict.compare(tmp_path, record={"rounds": rounds, "failed": {}, "reason": None})
    assert rows[1]["measured_by"] == "rounds" and rows[1]["ratio"] == approx(23.5 / 21, rel=0.02)
    (caveat,) = [one for one in find_caveats(rows) if "do not" not in one and "instead of" in one]
    assert caveat.startswith("attn=b: the step times of the training runs give 3.400 instead of 1.1")
    assert rows[1]["rounds"]["steps"] == 80 and rows[1]["rounds"]["other_cores"] == [0.01] * 8


@pytest.fixture
def runs(tmp_path):
    for num, name in enumerate(("first", "second")):
        job(tmp_path, num, name, median=40.0 / (num + 1))
        (tmp_path / name / "job.json").unlink()
    return [tmp_path / "first", tmp_path / "second"]


def test_compare_existing__shows_ratios_and_names_no_winner(runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert console.main(["compare", *map(str, runs), "--out", str(out)]) == 0
    rows = json.loads((out / "comparison.json").read_text())
    assert [(row["ratio"], row["judgement"]) for row in rows] == [(1.0, None), (2.0, "open")]
    said = " ".join(capsys.readouterr().out.split())
    assert "no winner between" in said and "the runs were started separately" in said
    assert (out / "comparison.png").exists() and "| 2.000 ? |" in (out / "comparison.md").read_text()


def test_compare_existing__refuses_folders_without_a_run(runs, tmp_path, capsys):
    with error("compare.no_run", folder=str(tmp_path / "none")):
        verdict.compare_existing([runs[0], tmp_path / "none"])
    with error("compare.twice"):
        verdict.compare_existing([runs[0], tmp_path / "out" / ".." / "first"])
    with error("compare.single"):
        verdict.compare_existing(runs[:1])
    assert console.main(["compare", str(runs[0]), str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().err


def test_compare_existing__shows_the_verdict_of_a_sweep_again(tmp_path, capsys):
    job(tmp_path, 0, "attn=a", median=40.0)
    job(tmp_path, 1, "attn=b", median=20.0)
    assert console.main(["compare", str(tmp_path)]) == 0
    assert "attn=b" in capsys.readouterr().out
