"""FSDP's gather="auto": weights travel as autocast rounds them, the rest is replicated, the bits equal "fp32"."""

import json
import os

import pytest
import torch
from ranks import Ranks
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from vitkernels import parallel
from vitkernels.models import create_model, read_state_dict, set_ops
from vitkernels.parallel.replicated_params import parameters_to_replicate
from vitkernels.quant import train_in_8_bits
from vitkernels.runtime.base import Runtime

pytestmark = pytest.mark.slow


def small(**kwargs):
    torch.manual_seed(0)
    return create_model("vit_digits", "sdpa", num_classes=10, embed_dim=64, num_heads=2, depth=2, **kwargs)


def train(engine, optimizer_name, clip):
    """Train two steps of two micro-batches, with different images, and so different drop path, on each process."""
    model = small(init_values=0.1, drop_path_rate=0.2)
    torch.manual_seed(1 + engine.rank)
    ema = ModelEmaV3(model, 0.5)
    net, ema_net = engine.wrap(model), engine.wrap(ema.module)
    optimizer = create_optimizer_v2(model, optimizer_name, lr=1e-2, weight_decay=0.1)
    engine.prepare(optimizer)
    figures, norms = [], []
    for step in (1, 2):
        for batch in range(2):
            images, targets = torch.randn(4, 1, 16, 16), torch.randint(10, (4,))
            with engine.accumulating(net, last=batch == 1):
                with engine.runtime.autocast():
                    logits = net(images)
                loss = F.cross_entropy(logits.float(), targets)
                loss.backward()
            figures.append(loss.item())
        norms.append(engine.clip_gradients(model.parameters(), clip, optimizer).item())
        assert engine.gather(norms[-1]) == [norms[-1]] * engine.world
        optimizer.step()
        optimizer.zero_grad()
        engine.update_ema(ema, model, step)
        with torch.no_grad(), engine.runtime.autocast():
            figures += ema_net(images).flatten().tolist()
    inner = getattr(optimizer, "_base_optimizer", optimizer)
    for name, parameter in model.named_parameters():
        kinds = {isinstance(v, DTensor) for v in inner.state[parameter].values() if getattr(v, "shape", ())}
        assert kinds == {isinstance(parameter, DTensor)}, f"{optimizer_name}: {name} and its state"
    replicated = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    weights = engine.full_state_dict(model) | {f"ema.{k}": v for k, v in engine.full_state_dict(ema.module).items()}
    for name, weight in weights.items():
        assert len(set(engine.gather(weight.double().sum().item()))) == 1, f"{name} differs between ranks"
    return figures, norms, weights, replicated


def train_with_both_gathers(world):
    cases = [("adamw", {}), ("lamb", {"overlap": True})]
    if world == 2:
        cases += [("adamw", {"reshard": True}), ("adamw", {"reduce": "bf16"}), ("lookahead_adamw", {})]
    number = 0
    for optimizer, settings in cases:
        for clip in (None, 0.2):
            found = []
            for gather in ("fp32", "auto"):
                number += 1
                os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # separate keys in the shared store
                with parallel.create("fsdp", Runtime("bf16"), gather=gather, **settings) as engine:
                    found.append(train(engine, optimizer, clip))
            (figures, norms, weights, none), (ours, our_norms, our_weights, replicated) = found
            case = f"{optimizer} {settings} clip {clip}: {figures} and {ours}, {norms} and {our_norms}"
            assert not none and {"pos_embed", "fc_norm.weight", "head.bias"} <= set(replicated)
            assert not any(
                name.endswith(("fc1.weight", "qkv.weight", "patch_embed.proj.weight")) for name in replicated
            )
            rounds_averages = "bf16" in settings.values()
            assert our_norms == pytest.approx(norms, rel=1e-2 if rounds_averages else 1e-5), case
            if world == 2 and clip is None and not rounds_averages:  # a sum of two has only one order
                assert figures == ours, case
                assert all(torch.equal(weights[name], our_weights[name]) for name in weights), case
            else:
                assert ours[0] == figures[0] and ours == pytest.approx(figures, rel=0.05, abs=0.02), case


@pytest.mark.parametrize("world", [2, 4])
def test_gather_auto__equals_fp32_bit_for_bit(tmp_path, world):
    ranks = Ranks.of(world, tmp_path / "log", train_with_both_gathers, world)
    assert ranks.finish() == [0] * world, ranks.output()


def wrap_models_that_are_not_rounded():
    """8-bit layers and their EMA with plain layers; a frozen model; a model with one trainable layer."""
    images = torch.randn(2, 1, 16, 16)
    with parallel.create("fsdp", Runtime("bf16")) as engine:
        model = small()
        ema = ModelEmaV3(model, 0.5)
        train_in_8_bits(model, "int8", lambda name, _: name.endswith("qkv"))
        net, _ = engine.wrap(model), engine.wrap(ema.module)
        with engine.runtime.autocast():
            net(images).sum().backward()
        engine.update_ema(ema, model, 1)
        assert all(isinstance(p, DTensor) for m in (model, ema.module) for p in m.parameters())

    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    with parallel.create("fsdp", Runtime("bf16")) as engine:
        frozen = engine.wrap(small().requires_grad_(False))
        with engine.runtime.autocast():
            assert not frozen(images).requires_grad

        model = small().requires_grad_(False)
        model.fc_norm.requires_grad_(True)
        net = engine.wrap(model)
        with engine.runtime.autocast():
            (net(images + engine.rank).square().sum() * (1 + engine.rank)).backward()
        norm = engine.clip_gradients(model.parameters(), None)
        gradients = [p.grad for p in model.fc_norm.parameters()]
        assert norm == pytest.approx(nn.utils.get_total_norm(gradients).item()) and norm > 0
        assert len(set(engine.gather(gradients[0].sum().item()))) == 1


def test_gather_auto__with_8_bit_and_frozen_models(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", wrap_models_that_are_not_rounded)
    assert ranks.finish() == [0, 0], ranks.output()


def test_parameters_to_replicate__are_those_that_autocast_does_not_round():
    model = small(init_values=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    replicated = [names[id(parameter)] for parameter in parameters_to_replicate(model)]
    expected = {n for n, p in model.named_parameters() if p.ndim == 1 or n == "pos_embed"}
    assert len(replicated) == len(set(replicated)) and set(replicated) == expected
    assert parameters_to_replicate(small(reg_tokens=200)) is None, "too many"
    for op in ("linear", "mlp"):
        ops = {"layer_norm_residual": "reference", op: "reference"}
        assert parameters_to_replicate(set_ops(small(), ops)) is None, f"{op} does not round gradients"
    assert parameters_to_replicate(set_ops(small(), {"layer_norm_residual": "reference"})) is not None
    for layer in ("attn.proj", "mlp"):  # one layer, and two fused
        assert (
            parameters_to_replicate(train_in_8_bits(small(), "int8", lambda name, _, only=layer: only in name)) is None
        )

    class Doubled(nn.Linear):
        """A subclass, which may read its weight unrounded."""

    model = small()
    model.head = Doubled(64, 10)
    assert any(parameter is model.head.weight for parameter in parameters_to_replicate(model))


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_checkpoints__resume_across_gathers_strategies_and_worlds(tmp_path):
    """Alternate fp32 and auto on two processes, as fp32 alone; resume on four, with ddp on two, and on one."""
    common = ["runtime.precision=bf16", "ema.decay=0.9", "trainer.eval_every=1", "checkpoints.every_steps=2"]
    common += ["resume=auto", "trainer.accum_steps=2"]
    two = ["parallel=fsdp", "data.batch_size=8"]
    straight = Ranks(2, tmp_path / "fp32", *common, *two, "parallel.gather=fp32", "trainer.max_steps=6")
    assert straight.finish() == [0, 0], straight.output()
    folder = tmp_path / "alternating"
    for until, gather in ((2, "auto"), (4, "fp32"), (6, "auto")):
        ranks = Ranks(2, folder, *common, *two, f"parallel.gather={gather}", f"trainer.max_steps={until}")
        assert ranks.finish() == [0, 0], ranks.output()
        assert ("weights are gathered in bf16" in ranks.output(0)) == (gather == "auto")
        assert (f"resumed from {folder}" in ranks.output(0)) == (until > 2)
    assert losses(folder) == pytest.approx(losses(tmp_path / "fp32"), rel=1e-5) and len(losses(folder)) == 6
    for name in ("model.safetensors", "model_ema.safetensors", "checkpoints/step_00000006"):
        one, other = read_state_dict(tmp_path / "fp32" / name), read_state_dict(folder / name)
        assert one.keys() == other.keys()
        assert all((one[k] - other[k]).abs().max() < 3e-3 for k in one)  # Adam's steps for gradients near zero

    for until, world, name in ((7, 4, "fsdp"), (8, 2, "ddp"), (9, 2, "fsdp"), (10, 1, "none")):
        words = [f"parallel={name}", f"data.batch_size={16 // world}", f"trainer.max_steps={until}"]
        before = read_state_dict(folder / "model_ema.safetensors")
        ranks = Ranks(world, folder, *common, *words)
        assert ranks.finish() == [0] * world, ranks.output()
        assert f"resumed from {folder}" in ranks.output(0)
        after = read_state_dict(folder / "model_ema.safetensors")
        assert all((before[k] - after[k]).abs().max() < 3e-3 for k in before), "one step of 1e-3"
    alone = Ranks(1, tmp_path / "alone", *common, "data.batch_size=16", "trainer.max_steps=10")
    assert alone.finish() == [0], alone.output()
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=1e-2)  # gradients rounded by each process
