"""The trainings and evaluations whose figures recorded.json holds, as command lines of train.py.

No case trains in fp16, the path of the gradient scaler, because the CPU runtime supports only fp32 and bf16.
"""

from dataclasses import dataclass

STOPPED_AT = 11  # the step of the checkpoint that resumed runs start from
CHECKPOINT = f"checkpoints/step_{STOPPED_AT:08d}"

_RUN = ("runtime=cpu", "compile=false", "trainer.max_steps=20", "trainer.log_every=4", "trainer.warmup_steps=2")
_SMALL = (*_RUN, "attn=native", "data.batch_size=16", "+model.kwargs.embed_dim=64", "+model.kwargs.num_heads=2")
_SMALL += ("+model.kwargs.depth=2", f"checkpoints.every_steps={STOPPED_AT}")
# For interpreted kernels. Triton's attention takes head dims from 32.
_TINY = (*_RUN, "data.batch_size=4", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=1", "+model.kwargs.depth=1")
_TINY += ("trainer.eval_every=null", "checkpoints.every_epochs=null")

_RICH = ("trainer.accum_steps=2", "ema.decay=0.9", "model.drop_path_rate=0.2", "trainer.label_smoothing=0.1")
_RICH += ("data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}",)
_IMAGES = ("data=imagefolder", "data.num_workers=0", "model.in_chans=3", "data.auto_augment=rand-m9-mstd0.5")
_IMAGES += ("data.re_prob=0.25", "data.crop_pct=0.9", "data.decode=pillow")

# The tiniest model with drop path; its folder is committed.
OLD_RUN = (*_RUN, "attn=native", "data.batch_size=16", "+model.kwargs.embed_dim=8", "+model.kwargs.num_heads=1")
OLD_RUN += ("+model.kwargs.depth=2", f"checkpoints.every_steps={STOPPED_AT}", "ema.decay=0.9")
OLD_RUN += ("model.drop_path_rate=0.2", "data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}")

SWEEP = ("-m", *(word for word in _SMALL if word != "attn=native"), "attn=native,sdpa", "trainer.max_steps=4")
SWEEP += ("sweep.rounds=null",)


@dataclass(frozen=True)
class Case:
    """words: overrides. packages: those that its figures depend on, besides PACKAGES. slow: whether its test is.

    world: ranks, each a process. own_process: whether `python train.py` runs it instead of a forked process.
    resumes, evaluates: (another case, or the folder OLD; a path in its run folder).
    continues: the case, or OLD, whose run folder it continues in a copy. images: whether it needs image files.
    """

    words: tuple[str, ...]
    packages: tuple[str, ...] = ()
    slow: bool = False
    world: int = 1
    own_process: bool = False
    resumes: tuple[str, str] | None = None
    evaluates: tuple[str, str] | None = None
    continues: str | None = None
    images: bool = False


PACKAGES = ("torch", "numpy", "timm", "scikit-learn")
OLD = "run_folder"  # next to this file

CASES = {
    "plain": Case(_SMALL, own_process=True),
    "bf16": Case((*_SMALL, "runtime.precision=bf16")),
    "accum": Case((*_SMALL, "trainer.accum_steps=2")),
    "ema": Case((*_SMALL, "ema.decay=0.9")),
    "mixup": Case((*_SMALL, "data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}")),
    "drop_path": Case((*_SMALL, "model.drop_path_rate=0.2")),
    "rich": Case((*_SMALL, *_RICH)),
    "sgd": Case((*_SMALL, "optim=sgd", "schedule=constant", "trainer.clip_grad=0.5")),
    "int8": Case((*_SMALL, "quant=int8")),
    "images": Case((*_SMALL, *_IMAGES), packages=("torchvision", "pillow"), images=True),
    "fused": Case((*_TINY, "attn=native", "ops=fused"), packages=("triton",), slow=True),
    "triton_flash": Case((*_TINY, "attn=triton_flash"), packages=("triton",), slow=True),
    "pallas_flash": Case((*_TINY, "attn=pallas_flash"), packages=("jax", "jaxlib"), slow=True),
    "ddp": Case((*_SMALL, "parallel=ddp", "data.batch_size=8"), slow=True, world=2),
    "fsdp": Case((*_SMALL, "parallel=fsdp", "data.batch_size=8"), slow=True, world=2),
    "resumed": Case(_SMALL, resumes=("plain", CHECKPOINT)),
    "resumed_rich": Case((*_SMALL, *_RICH), resumes=("rich", CHECKPOINT)),
    "evaluated_export": Case((*_SMALL, "mode=eval"), evaluates=("plain", "model.safetensors")),
    "evaluated_best": Case((*_SMALL, "mode=eval"), evaluates=("plain", "checkpoints/best")),
    "evaluated_w8a8": Case((*_SMALL, "mode=eval", "quant=w8a8"), evaluates=("plain", "model.safetensors")),
    "old_run_resumed": Case(OLD_RUN, resumes=(OLD, CHECKPOINT)),
    "old_run_longer": Case((*OLD_RUN, "trainer.max_steps=24", "resume=auto"), continues=OLD),
    "old_run_evaluated_export": Case((*OLD_RUN, "mode=eval"), evaluates=(OLD, "model.safetensors")),
    "old_run_evaluated_best": Case((*OLD_RUN, "mode=eval"), evaluates=(OLD, "checkpoints/best")),
}
