"""The groups of the configuration, one dataclass each; attributes have the names of the settings in conf/.

The sentences below are also the comments in conf/*.yaml, the command line's help and the reference in docs/.
"""

from dataclasses import dataclass
from typing import Any, Literal

from vitkernels.config.setting import setting

COMPILE_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's
Compile = bool | Literal["auto", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]

_STEPS = "optimizer steps"


@dataclass(frozen=True)
class TrainerSettings:
    """Length of training, gradients and intervals."""

    max_epochs: float = setting(40, "Length of training, unless max_steps is set.", unit="epochs", least=0)
    max_steps: int | None = setting(None, "Length of training; overrides max_epochs.", unit=_STEPS, least=1)
    accum_steps: int = setting(
        1,
        "Batches per optimizer step; leftover batches at the end of an epoch are dropped.",
        unit="batches",
        least=1,
    )
    clip_grad: float | None = setting(1.0, "Maximum gradient norm; null disables clipping.", least=0)
    loss: Literal["auto", "cross_entropy", "bce"] = setting(
        "auto", "Cross-entropy, or binary cross-entropy of each class (bce); auto is bce for data with several labels."
    )
    bce_threshold: float | None = setting(
        None, "With loss=bce, targets above this threshold become 1 and others 0; null keeps them.", least=0, greatest=1
    )
    label_smoothing: float = setting(
        0.0, "Share of the target probability that is spread over all classes.", least=0, greatest=1
    )
    log_every: int = setting(
        20, "Interval between log lines; the host waits for the device at each.", unit=_STEPS, least=1
    )
    eval_every: int | None = setting(
        1, "Interval between evaluations; null disables evaluation.", unit="epochs", least=1
    )
    warmup_steps: int = setting(
        10, "First steps of the process, excluded from timing: compilation, autotuning, cold caches.",
        unit=_STEPS, least=0,
    )  # fmt: skip
    profile: bool = setting(False, "Write a torch.profiler trace of a few steps to the run folder.")


@dataclass(frozen=True)
class EmaSettings:
    """Running average of the weights, evaluated and saved along with them."""

    decay: float | None = setting(None, "Decay per step, such as 0.9998; null keeps no average.", least=0, greatest=1)
    warmup: bool = setting(True, "Ramp up the decay: it reaches 0.999 after 32 k steps and 0.9999 after 1 M.")


@dataclass(frozen=True)
class DistillSettings:
    """Distillation: the model also learns from a trained teacher's predictions."""

    teacher: str | None = setting(
        None, "A timm model, a run, or a folder in timm's layout to distill from; null disables distillation."
    )
    checkpoint: str | None = setting(None, "Weights file for a timm model as teacher; null downloads timm's.")
    kind: Literal["hard", "soft"] = setting(
        "hard", "Learn the teacher's most likely class (hard), or its distribution (soft)."
    )
    weight: float = setting(
        0.5, "Weight of the teacher's loss; DeiT uses 0.5 (hard) and 0.1 (soft).", least=0, greatest=1
    )
    temperature: float = setting(3.0, "Softmax temperature of both distributions, used by kind=soft.", least=1e-3)


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are written, and how many are kept."""

    every_epochs: int | None = setting(
        1, "Interval between checkpoints; null here and in every_steps writes none.", unit="epochs", least=1
    )
    every_steps: int | None = setting(
        None, "Interval between additional checkpoints, for long epochs.", unit=_STEPS, least=1
    )
    keep: int = setting(2, "Number of newest checkpoints to keep, in addition to the best.", least=1)


@dataclass(frozen=True)
class SweepSettings:
    """How the jobs of a sweep (-m) run on a machine."""

    rerun: bool = setting(
        False, "Repeat all finished jobs; if false, only those under 15 minutes whose code or packages changed."
    )
    objective: str | tuple[str, ...] = setting(
        "val_top1", "Entry of summary.json that a sweeper such as Optuna optimizes, or a list of entries."
    )
    slots: int | Literal["auto", "gpus"] | None = setting(
        "auto", "Concurrent jobs per machine: gpus is one per GPU; null sets no limit; auto depends on the launcher.",
        least=1,
    )  # fmt: skip
    rounds: int | Literal["auto"] | None = setting(
        "auto", "Rounds in which the variants are timed in turns after training; null skips them.", least=1
    )
    compile_cache: str | None = setting(
        "~/.cache/vitkernels", "Folder in which jobs share compiled kernels; null shares none."
    )


@dataclass(frozen=True)
class AttentionSettings:
    """Attention backend of every block."""

    name: str = setting("auto", "Attention backend; auto selects the fastest that supports the model on this device.")
    options: dict[str, Any] = setting(dict, "Options of the backend, such as tiles.", collects_rest=True)


# The settings of OpsSettings that name backends.
OPS = ("name", "layer_norm_residual", "linear", "mlp", "patch_embed", "cross_entropy", "adamw")


@dataclass(frozen=True)
class OpsSettings:
    """Backends of LayerNorm, linear layers, MLP, patch embedding, loss and optimizer update."""

    name: Literal["eager", "fused", "auto"] = setting("auto", "Name of the preset.")
    layer_norm_residual: str = setting("auto", "Backend of residual add, LayerScale, drop path and LayerNorm.")
    linear: str = setting("auto", "Backend of attention's projections.")
    mlp: str = setting("auto", "Backend of the MLP: linear, GELU, linear.")
    patch_embed: str = setting("auto", "Backend of the patch embedding.")
    cross_entropy: str = setting("auto", "Backend of the loss, with label smoothing and mixed targets.")
    adamw: Literal["eager", "auto", "triton"] = setting("auto", "Backend of the AdamW update.")
    residual_precision: Literal["fp32", "bf16"] | None = setting(
        None, "Precision of the residual stream; bf16 halves its traffic and rounds it, null is timm's."
    )
    keep_activation: bool = setting(
        False, "Store the MLP's activation: a faster backward pass, at the cost of one more hidden tensor per block."
    )


@dataclass(frozen=True)
class QuantSettings:
    """Quantization of linear layers: dtype for training, bits for evaluating trained weights."""

    name: str = setting("none", "Name of the scheme.")
    dtype: Literal["int8", "fp8"] | None = setting(None, "Data type of matrix products in training.")
    weight_bits: Literal[4, 8] | None = setting(None, "Bits of a weight.")
    activation_bits: Literal[8, 16] = setting(16, "Bits of an activation; 16 leaves activations unquantized.")
    block_size: int = setting(-1, "Input features that share a scale; -1 is all of them.", least=-1)
    symmetric: bool = setting(True, "Symmetric quantization; false adds zero points, for skewed weights.")
    fp8: bool = setting(False, "Use fp8 (e4m3) instead of int8.")
    skip: tuple[str, ...] = setting(("head",), "Layers to leave unquantized, by the end of their names.")
    backend: str = setting("auto", "Backend of quantized_matmul.")


@dataclass(frozen=True)
class ModelSettings:
    """Architecture: any timm vision transformer, or a preset of this package."""

    name: str = setting("vit_digits", "Name of the model.")
    img_size: int | None = setting(None, "Image size; null is the model's.", unit="pixels", least=1, greatest=16384)
    in_chans: int | None = setting(None, "Image channels; null is the model's.", least=1)
    drop_path_rate: float | None = setting(None, "Stochastic depth rate; null is the model's.", least=0, below=1)
    pretrained: bool = setting(False, "Download and load timm's weights.")
    kwargs: dict[str, Any] = setting(dict, "Other arguments for timm, e.g. +model.kwargs.dynamic_img_size=true.")


@dataclass(frozen=True)
class DataSettings:
    """Data set: the function that builds it, and its arguments."""

    target: str = setting(
        "vitkernels.data.digits.build", "Function that builds the data set, MODULE.FUNCTION.", key="_target_"
    )
    batch_size: int = setting(32, "Images per batch and device; with torchrun, per process.", least=1)
    num_workers: int | Literal["auto"] = setting(
        0, "Processes that prepare batches; 0 uses the training process, auto starts one per CPU core.", least=0
    )
    options: dict[str, Any] = setting(dict, "Further arguments of the function.", collects_rest=True)

    @property
    def arguments(self) -> dict[str, Any]:
        """The function's keyword arguments: all settings but `target`."""
        return {"batch_size": self.batch_size, "num_workers": self.num_workers, **self.options}


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer, from timm's factory."""

    opt: str = setting("adamw", "Optimizer: its name in timm, or the import path of a class.")
    lr: float = setting(1e-3, "Learning rate after warm-up; not scaled by the batch size.", least=0)
    weight_decay: float = setting(0.05, "Weight decay; biases and norms have none.", least=0)
    layer_decay: float | None = setting(
        None, "Learning rate factor per earlier block, for fine-tuning: 0.65 to 0.8.", least=1e-6, greatest=1
    )
    kwargs: dict[str, Any] = setting(dict, "Other arguments for the optimizer, e.g. +optim.kwargs.betas=[0.9,0.95].")


@dataclass(frozen=True)
class ScheduleSettings:
    """Learning rate over time, from timm's schedulers; updated every step."""

    # Other schedules of timm have lengths in epochs; these are scaled to the number of steps.
    sched: Literal["cosine", "tanh", "poly"] = setting("cosine", "Schedule, by its name in timm.")
    warmup_epochs: float = setting(2, "Length of the linear warm-up.", unit="epochs", least=0)
    warmup_cap: float | None = setting(
        0.1, "Largest share of training that warm-up may take; null sets no limit.", least=0, greatest=1
    )
    warmup_lr: float = setting(1e-6, "Learning rate at the first step of warm-up.", least=0)
    min_lr: float = setting(1e-6, "Learning rate at the last step.", least=0)


@dataclass(frozen=True)
class RuntimeSettings:
    """Device and precision."""

    name: str = setting("auto", "Device: cpu, cuda or xla; auto takes the first available of cuda, xla and cpu.")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "auto", "Precision of matrix products; weights stay float32. auto is fp32 on the CPU, bf16 elsewhere."
    )


@dataclass(frozen=True)
class ParallelSettings:
    """Training on several devices: ddp or fsdp, under torchrun or on a TPU slice."""

    name: str = setting("auto", "Strategy: none, ddp or fsdp; auto is ddp if there are several devices.")
    lost_after: float = setting(
        30, "Time without a heartbeat after which a process counts as lost and the others exit.",
        unit="seconds", least=0,
    )  # fmt: skip
    overlap: bool | Literal["auto"] = setting(
        "auto", "Send gradients during backward (true) or after it (false); auto is true on several hosts."
    )
    reduce: Literal["fp32", "bf16"] = setting("fp32", "Precision of the gradient all-reduce; bf16 halves its traffic.")
    send: Literal["auto", "nccl", "copy"] = setting(
        "auto", "Gradient transport of ddp: nccl, or copy through host memory; auto selects the faster one."
    )
    gather: Literal["auto", "fp32", "bf16"] = setting(
        "auto", "Precision of fsdp's all-gather; auto sends bf16 only for weights that autocast rounds to it."
    )
    reshard: bool = setting(
        False, "Free fsdp's gathered parameters after forward: slower, for models that do not fit otherwise."
    )


@dataclass(frozen=True)
class LoggerSettings:
    """Weights & Biases or MLflow, in addition to metrics.jsonl, TensorBoard and the terminal."""

    name: Literal["none", "wandb", "mlflow"] = setting(
        "none", "Additional destination for metrics; metrics.jsonl, TensorBoard and the terminal always get them."
    )
    project: str = setting("vitkernels", "Project of Weights & Biases, or experiment of MLflow.")


@dataclass(frozen=True)
class EvaluationSettings:
    """Classifier that mode=eval evaluates: the trained head, or knn or linear_probe on the frozen features."""

    name: Literal["head", "knn", "linear_probe"] = setting("head", "Classifier for the evaluation images.")
    neighbors: int = setting(20, "With knn, number of nearest training images that vote.", least=1)
    temperature: float = setting(
        0.07,
        "With knn, temperature of the votes; a vote weighs exp(similarity / temperature).",
        least=1e-3,
    )
