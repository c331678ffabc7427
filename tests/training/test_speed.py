"""The choices that make runs fast: compile=auto, ops=auto and speed=max."""

import logging
from types import SimpleNamespace

import pytest
import torch

from vitkernels import models, parallel, runtime
from vitkernels.config import Config
from vitkernels.models.fused_modules import FusedBlocks
from vitkernels.parallel.ddp import Ddp
from vitkernels.parallel.fsdp import Fsdp
from vitkernels.runtime.cuda import CudaRuntime
from vitkernels.training import setup

TINY = ["data=fake", "data.num_classes=10", "data.batch_size=4", "data.val_items=4", "model=vit_digits", "attn=native"]
TINY += ["+model.kwargs.depth=2", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=1", "trainer.max_steps=4"]
TINY += ["trainer.eval_every=null", "checkpoints.every_epochs=null"]


def on(device_class, **attributes):
    """Return a strategy as compile_mode sees it: its class's choices, without processes."""
    strategy = object.__new__(attributes.pop("strategy", parallel.Parallel))
    strategy.runtime = object.__new__(device_class)
    vars(strategy).update(attributes)
    return strategy


CASES = {
    "a GPU": ({}, (), (True, "reduce-overhead")),
    "accumulation, EMA and mixup": (
        {},
        ("trainer.accum_steps=2", "ema.decay=0.9", "data=digits", "data.mixup={mixup_alpha: 0.8}"),
        (True, "reduce-overhead"),
    ),
    "ddp": ({"strategy": Ddp, "send": "auto", "overlap_copies": True}, (), (True, "reduce-overhead")),
    "ddp, copies after backward": (
        {"strategy": Ddp, "send": "copy", "overlap_copies": False}, (), (True, "reduce-overhead"),
    ),
    "fsdp": ({"strategy": Fsdp}, (), (True, None)),
    "a mode of one's own": ({}, ("compile=max-autotune",), (True, "max-autotune")),
    "compile=true": ({}, ("compile=true",), (True, None)),
    "compile=false": ({}, ("compile=false",), (False, None)),
    "an evaluation": ({}, ("mode=eval", "checkpoint=x"), (True, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_compile_mode(settings, name):
    attributes, words, expected = CASES[name]
    cfg = Config.from_hydra(settings(*words))
    strategy = on(CudaRuntime, **attributes)
    assert setup.compile_mode(cfg, strategy) == expected
    text = setup._describe_compilation(cfg, strategy)
    assert ("CUDA graphs (auto" in text) == (cfg.compile == "auto") and (expected[1] or "") in text


@pytest.mark.parametrize("can_send", [True, False])
def test_compile_mode__copies_during_backward_need_a_pytorch_that_sends_between_graphs(settings, monkeypatch, can_send):
    monkeypatch.setattr("vitkernels.parallel.ddp.can_send_between_cuda_graphs", lambda: can_send)
    strategy = on(CudaRuntime, strategy=Ddp, send="copy", overlap_copies=True)
    cfg = Config.from_hydra(settings())
    assert setup.compile_mode(cfg, strategy) == (True, "reduce-overhead" if can_send else None)
    assert can_send or "torch 2.11" in setup._describe_compilation(cfg, strategy)


def test_compile_mode__nothing_is_compiled_on_a_cpu(settings):
    cpu = parallel.Parallel(runtime.create("cpu"))
    assert setup.compile_mode(Config.from_hydra(settings()), cpu) == (False, None)


def build(settings, *words):
    cfg = Config.from_hydra(settings(*TINY, *words))
    strategy = parallel.Parallel(runtime.create("cpu", cfg.runtime.precision))
    return setup.trainer_from_config(cfg, strategy)


def test_defaults_on_a_cpu__are_modules_of_timm(settings, caplog):
    with caplog.at_level(logging.INFO):
        trainer, parts = build(settings)
    blocks = parts.model.get_submodule("blocks")
    assert not isinstance(blocks, FusedBlocks) and type(trainer.optimizer).__module__.startswith("torch.optim")
    assert "ops eager" in caplog.text and caplog.text.count("no kernel for cpu") == 1


def test_speed_max__without_kernels_adds_nothing_and_says_so(settings, caplog):
    with caplog.at_level(logging.INFO):
        _, parts = build(settings, "speed=max")
    assert not isinstance(parts.model.get_submodule("blocks"), FusedBlocks)
    assert "speed=max: adds nothing here" in caplog.text


@pytest.mark.parametrize(("precision", "residual"), [("bf16", torch.bfloat16), ("fp32", None)])
def test_speed_max__rounds_the_stream_and_keeps_activations_where_ops_are_fused(settings, caplog, precision, residual):
    words = ["ops.layer_norm_residual=reference", "ops.mlp=reference", f"runtime.precision={precision}"]
    with caplog.at_level(logging.INFO):
        _, parts = build(settings, "speed=max", *words)
    blocks = parts.model.get_submodule("blocks")
    assert blocks.residual_dtype is residual and all(block.keep_activation for block in blocks)
    assert ("rounded to bf16" in caplog.text) == (residual is not None) and "stay in memory" in caplog.text


def test_fused_by__matches_set_ops():
    model = models.create_model("vit_digits", "native", num_classes=10)
    assert models.fused_by(model, dict.fromkeys(models.MODEL_OPS, "auto"), "cpu") == set()
    assert models.fused_by(model, dict.fromkeys(models.MODEL_OPS, "auto"), "cuda") == set(models.MODEL_OPS)
    without = {"layer_norm_residual": "eager", "mlp": "auto", "linear": "reference"}
    assert models.fused_by(model, without, "cuda") == {"linear"}, "mlp needs layer_norm_residual"


def test_accelerate__fuses_the_same_ops_as_a_default_run():
    def kinds(model):
        return [type(module) for name, module in model.named_modules() if not name.endswith("attn")]

    plain = models.timm_model("vit_digits", num_classes=10)
    ours = models.create_model("vit_digits", "native", num_classes=10)
    defaults = Config().ops
    models.set_ops(ours, {op: getattr(defaults, op) for op in models.MODEL_OPS}, device="cuda")
    before = kinds(plain)
    assert kinds(models.accelerate(plain, "native", device="cuda")) == kinds(ours) != before


def test_accumulation__copies_gradients_that_a_replay_would_overwrite(settings):
    """A net whose backward writes all gradients of a parameter to one place, as a CUDA graph's does."""
    trainer, _ = build(settings, "trainer.accum_steps=2")
    places, seen = {}, []

    def overwrite(name):
        def hook(gradient):
            place = places.setdefault(name, torch.empty_like(gradient))
            seen.append(gradient.clone())
            return place.copy_(gradient)

        return hook

    head = trainer.model.get_parameter("head.bias")
    head.register_hook(overwrite("head.bias"))
    trainer.cuda_graphs = True
    found = []
    trainer.optimizer = SimpleNamespace(
        step=lambda: found.append(head.grad.clone()), zero_grad=trainer.optimizer.zero_grad,
        param_groups=trainer.optimizer.param_groups,
    )  # fmt: skip
    trainer.clip_grad = None
    trainer.scaler = SimpleNamespace(
        scale=lambda loss: loss, unscale_=lambda o: None, step=lambda o: o.step(), update=lambda: None
    )
    trainer.train_step(trainer.parallel.feed(trainer.plan.batches(trainer.data.train, 0)))
    torch.testing.assert_close(found[0], seen[0] + seen[1])


GPU_CASES = {
    "plain": (),
    "accumulation": ("trainer.accum_steps=2",),
    "EMA, mixup, drop path": (
        "data=digits", "ema.decay=0.9", "model.drop_path_rate=0.2", "data.mixup={mixup_alpha: 0.8}",
        "trainer.eval_every=1",
    ),
    "speed=max": ("speed=max",),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_defaults_on_a_gpu__cuda_graphs_do_not_change_losses(settings, losses, tmp_path, name):
    import train

    tiny = [word for word in TINY if "attn" not in word and "embed_dim" not in word and "num_heads" not in word]
    if "data=digits" in GPU_CASES[name]:
        tiny = [word for word in tiny if not word.startswith("data.")]
    tiny += ["+model.kwargs.embed_dim=64", "+model.kwargs.num_heads=2", "data.batch_size=32", "trainer.max_steps=12"]
    found = {}
    for mode in ("auto", "true"):
        words = [*tiny, *GPU_CASES[name], f"compile={mode}", "runtime=cuda"]
        torch._dynamo.reset()
        train.run(settings(*words), tmp_path / mode)
        found[mode] = list(losses(tmp_path / mode).values())
    # The same kernels, but for those that the allocator's addresses or the graphs' padding change: bf16's last digits.
    assert found["auto"] == pytest.approx(found["true"], rel=2e-2)
