"""Step time of the bare training loop, of train.py, and of what a user would run instead, in one go.

    python scripts/bench_step.py                                    ViT-B/16 at 256 px, batch 128, AdamW, bf16
    python scripts/bench_step.py --model vit_digits --batch 8 --steps 4 --warmup 2 --results /tmp/step.jsonl
                                                                   anywhere, to try it out

Prints a table with timm's compiled model with SDPA as its measure, the losses of 200 steps from the same weights on the
same images, and appends its rows to results/step.jsonl. "best" is what the fastest settings give: `ops=auto` with a
residual stream in bf16 and the MLP's activation kept; train.py runs with them in a process of its own. `--peers` and
`--ours` choose rows; "compiled max-autotune" is torch.compile's slowest compilation.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vitkernels import models  # noqa: E402
from vitkernels import runtime as runtimes  # noqa: E402
from vitkernels.benchmarks import step  # noqa: E402
from vitkernels.errors import UsageError  # noqa: E402

MODEL = "vit_b16_256"
BASELINE = "timm compiled sdpa"
OURS = "eager", "fused", "best", "best reduce-overhead", "train.py"
BEST = ("ops=auto", "ops.residual_precision=bf16", "ops.keep_activation=true")


def train_py(args, settings: tuple[str, ...]) -> step.StepTimes:
    """The step times that train.py itself reports with these settings, on fake data of the same shape."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"model.name={args.model}", f"data.batch_size={args.batch}", f"data.num_classes={args.classes}",
            f"trainer.max_steps={args.warmup + args.steps}", f"trainer.warmup_steps={args.warmup}",
            f"runtime={args.runtime}", *settings, "data=fake", "optim=adamw", "schedule=constant",
            "trainer.clip_grad=null", "trainer.eval_every=null", "checkpoints.every_epochs=null",
            f"hydra.run.dir={folder}",
        ]  # fmt: skip
        subprocess.run([sys.executable, str(ROOT / "train.py"), *overrides], check=True, cwd=ROOT)
        summary = json.loads((Path(folder) / "summary.json").read_text())
    times = summary["step_time_ms"]
    return step.StepTimes(
        f"train.py {' '.join(settings)}",
        times["median"], times["p10"], times["p90"], times["n"],
        summary["peak_memory_bytes"], None, summary["train_loss"],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"by default {MODEL}, on a GPU")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--classes", type=int, default=1024)
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--attn", default="auto", help="the attention backend of our rows")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--learning-steps", type=int, default=200, help="0: no losses")
    parser.add_argument("--peers", nargs="*", default=["eager native", "eager sdpa", "compiled max-autotune"])
    parser.add_argument("--ours", nargs="*", choices=OURS, metavar="ROW", help=f"of {', '.join(OURS)}; all by default")
    parser.add_argument("--results", type=Path, default=ROOT / "results/step.jsonl")
    args = parser.parse_args()

    runtime = runtimes.create(args.runtime)
    if args.model is None and runtime.device.type == "cpu":
        parser.error(
            f"{MODEL} at batch {args.batch} needs a GPU, and here is {runtime.describe()}; "
            "a small --model can be tried, as in --help"
        )
    args.model = args.model or MODEL
    image_size, in_chans = models.input_spec(args.model)

    def timm_model(fused: bool):
        model = models.timm_model(args.model, num_classes=args.classes)
        for block in model.blocks:
            block.attn.fused_attn = fused
        return model.to(runtime.device)

    def ours(ops: str, *options):
        model = models.create_model(args.model, args.attn, num_classes=args.classes).to(runtime.device)
        config = OmegaConf.load(ROOT / f"conf/ops/{ops}.yaml")
        return models.set_ops(model, {op: config[op] for op in models.MODEL_OPS}, *options)

    peers = {
        "eager native": lambda: timm_model(fused=False),
        "eager sdpa": lambda: timm_model(fused=True),
        "compiled sdpa": lambda: runtime.compile(timm_model(fused=True)),
        "compiled reduce-overhead": lambda: runtime.compile(timm_model(fused=True), "reduce-overhead"),
        "compiled max-autotune": lambda: runtime.compile(timm_model(fused=True), "max-autotune"),
    }
    build = {f"timm {name}": peers[name] for name in dict.fromkeys(["compiled sdpa", *args.peers])}
    kernels = runtime.device.type == "cuda"  # elsewhere the fused ops would be interpreted
    rows_of_ours = {"eager": lambda: runtime.compile(ours("eager"))}
    if kernels:
        rows_of_ours |= {
            "fused": lambda: runtime.compile(ours("fused")),
            "best": lambda: runtime.compile(ours("auto", torch.bfloat16, True)),
            "best reduce-overhead": lambda: runtime.compile(ours("auto", torch.bfloat16, True), "reduce-overhead"),
        }
    chosen = [*rows_of_ours, "train.py"] if args.ours is None else args.ours
    if missing := set(chosen) - {*rows_of_ours, "train.py"}:
        parser.error(
            f"fused ops would only be interpreted on {runtime.describe()}: no row {', '.join(sorted(missing))}"
        )
    build |= {f"attn={args.attn} {name}": make for name, make in rows_of_ours.items() if name in chosen}
    ops_of = {"eager": "eager", "fused": "fused", "best": "auto", "best reduce-overhead": "auto"}
    adamw = {
        f"attn={args.attn} {row}": OmegaConf.load(ROOT / f"conf/ops/{ops}.yaml").adamw for row, ops in ops_of.items()
    }
    learns = [BASELINE, f"{BASELINE} again", f"attn={args.attn} fused", f"attn={args.attn} best"]
    build[f"{BASELINE} again"] = peers["compiled sdpa"]  # the noise between two measurements of the same thing
    context = {
        "model": args.model,
        "batch_size": args.batch,
        "device": runtime.device_name,
        "precision": runtime.precision,
    }
    rows = []
    for row in step.run_variants(
        build, runtime, learns, args.learning_steps, adamw,
        image_size=image_size, in_chans=in_chans, batch_size=args.batch, num_classes=args.classes,
        warmup=args.warmup, steps=args.steps,
    ):  # fmt: skip
        rows.append(row)
        step.append_results(args.results, [row], context)
    step.free(runtime)
    if "train.py" in chosen:
        rows.append(train_py(args, (f"attn={args.attn}", *(BEST if kernels else ()))))
        step.append_results(args.results, rows[-1:], context)
    print(f"\n{args.model}, batch {args.batch}, {runtime.describe()}\n")
    print(step.table(rows, args.batch, BASELINE), "", step.losses_table(rows, BASELINE), sep="\n")


if __name__ == "__main__":
    try:
        main()
    except UsageError as error:
        sys.exit(f"error: {error}")
