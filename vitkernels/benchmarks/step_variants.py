"""The variants that scripts/bench_step.py times: timm's model, this package's, and train.py."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkernels import models
from vitkernels.benchmarks.step import StepTimes, Variant
from vitkernels.config.compose import compose
from vitkernels.errors import UsageError
from vitkernels.runtime import Runtime

BASELINE = "timm compiled sdpa"
# train.py with only model and data set: with empty caches, and with the caches of that run; then also with speed=max.
TRAIN_PY = {
    "train.py cold": (),
    "train.py": (),
    "train.py speed=max": ("speed=max",),
}
# Our variants: (ops preset, the fastest settings or not, mode of torch.compile, compare losses or not).
_OURS = {
    "eager": ("eager", False, None, False),
    "fused": ("fused", False, None, True),
    "best": ("auto", True, None, True),
    "best reduce-overhead": ("auto", True, "reduce-overhead", False),
}
# timm's model after vitkernels.models.accelerate, in a loop like timm's: mode of torch.compile.
_ACCELERATED = {"accelerate": None, "accelerate reduce-overhead": "reduce-overhead"}
OURS = (*_ACCELERATED, *_OURS, *TRAIN_PY)


@dataclass(frozen=True)
class StepBenchmark:
    """The model and sizes that all variants share."""

    model: str
    attn: str
    batch: int
    classes: int
    warmup: int
    steps: int
    runtime_name: str = "auto"

    def variants(self, runtime: Runtime, peers: Sequence[str], ours: Sequence[str]) -> list[Variant]:
        """Return the baseline, timm's `peers`, `ours` except train.py, and the baseline again to show the noise."""
        peer_models = self._peer_models(runtime)
        names = dict.fromkeys([BASELINE, *(f"timm {name}" for name in peers)])
        variants = [
            Variant(name, peer_models[name.removeprefix("timm ")], compare_losses=name == BASELINE) for name in names
        ]
        variants += [self._our_variant(runtime, name) for name in ours if name not in TRAIN_PY]
        return [*variants, Variant(f"{BASELINE} again", variants[0].build, compare_losses=True)]

    def _peer_models(self, runtime: Runtime) -> dict[str, Callable[[], nn.Module]]:
        def timm_model(fused: bool) -> nn.Module:
            model = models.timm_model(self.model, num_classes=self.classes)
            modules: list[Any] = [module for module in model.modules() if hasattr(module, "fused_attn")]
            for module in modules:
                module.fused_attn = fused
            return model.to(runtime.device)

        return {
            "eager native": lambda: timm_model(fused=False),
            "eager sdpa": lambda: timm_model(fused=True),
            "compiled native": lambda: runtime.compile(timm_model(fused=False)),
            "compiled sdpa": lambda: runtime.compile(timm_model(fused=True)),
            "compiled reduce-overhead": lambda: runtime.compile(timm_model(fused=True), "reduce-overhead"),
            "compiled max-autotune": lambda: runtime.compile(timm_model(fused=True), "max-autotune"),
        }

    def _our_variant(self, runtime: Runtime, name: str) -> Variant:
        if name in _ACCELERATED:
            return Variant(f"timm {name}", lambda: self._accelerated(runtime, _ACCELERATED[name]))
        preset, fastest, mode, compare_losses = _OURS[name]
        ops = compose([f"ops={preset}"]).ops

        def build() -> nn.Module:
            model = models.create_model(self.model, self.attn, num_classes=self.classes).to(runtime.device)
            options = (torch.bfloat16, True) if fastest else ()
            model = models.set_ops(model, {op: getattr(ops, op) for op in models.MODEL_OPS}, *options)
            return runtime.compile(model, mode)

        return Variant(f"attn={self.attn} {name}", build, ops.adamw, compare_losses)

    def _accelerated(self, runtime: Runtime, mode: str | None) -> nn.Module:
        model = models.timm_model(self.model, num_classes=self.classes).to(runtime.device)
        return runtime.compile(models.accelerate(model, self.attn, device=runtime.device), mode)

    def available(self, runtime: Runtime, ours: Sequence[str] | None) -> list[str]:
        """Return the names among OURS to run; raise UsageError for fused variants on a device without their kernels."""
        possible = OURS if runtime.device.type == "cuda" else ("accelerate", "eager", *TRAIN_PY)
        if ours is None:
            return list(possible)
        if missing := sorted(set(ours) - set(possible)):
            raise UsageError(
                f"fused ops would be interpreted on {runtime.describe()}; omit {', '.join(missing)}",
                code="benchmarks.no_kernels",
                variants=missing,
            )
        return list(ours)

    def time_train_py(self, root: Path, name: str, caches: Path) -> StepTimes:
        """Return the step times that a row of TRAIN_PY reports, on fake data of the same shape.

        caches: folder for compiled kernels; "train.py cold" must come first.
        """
        with tempfile.TemporaryDirectory() as folder:
            overrides = [
                f"model.name={self.model}", "data=fake", f"data.batch_size={self.batch}",
                f"data.num_classes={self.classes}", f"trainer.max_steps={self.warmup + self.steps}",
                f"trainer.warmup_steps={self.warmup}", "trainer.eval_every=null", "checkpoints.every_epochs=null",
                f"runtime={self.runtime_name}", f"attn={self.attn}", *TRAIN_PY[name], f"hydra.run.dir={folder}",
            ]  # fmt: skip
            environment = {
                "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
                "TRITON_CACHE_DIR": str(caches / "triton"),
            }
            begin = time.monotonic()
            subprocess.run(
                [sys.executable, str(root / "train.py"), *overrides], check=True, cwd=root,
                env={**os.environ, **environment},
            )  # fmt: skip
            seconds = time.monotonic() - begin
            summary = json.loads((Path(folder) / "summary.json").read_text())
        times, first = summary["step_time_ms"], summary["first_step_s"]
        return StepTimes(
            name, times["median"], times["p10"], times["p90"], times["n"], summary["peak_memory_bytes"], None,
            summary["train_loss"], first_step_s=round(seconds - summary["seconds"] + first, 1),
        )  # fmt: skip
