"""Training in bfloat16 on several processes: calculated as on one, unless what is gathered is to be rounded."""

import os

import pytest
import torch
from ranks import Ranks
from timm.models import VisionTransformer
from torch.nn import functional as F

from vitkernels import parallel
from vitkernels.errors import UsageError
from vitkernels.parallel.base import Parallel
from vitkernels.runtime.base import Runtime

AS_ALONE = [("ddp", {})]
AS_ALONE += [("fsdp", {"overlap": o, "gather": gather}) for o in (True, False) for gather in ("auto", "fp32")]
ROUNDED = [("fsdp", {"overlap": overlap, "gather": "bf16"}) for overlap in (True, False)]


def train(engine, compiled=False):
    """Losses of three steps, and what dtypes the residual stream has before each block and after the last."""
    torch.manual_seed(0)
    depth = 1 if compiled else 2  # compilation takes long
    model = VisionTransformer(16, 4, num_classes=10, embed_dim=32, depth=depth, num_heads=2, init_values=0.1)
    images, targets = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    net = engine.wrap(model, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine.prepare(optimizer)
    losses, stream = [], []
    for module in () if compiled else (*model.blocks, model.norm):
        module.register_forward_pre_hook(lambda _, inputs: stream.append(inputs[0].dtype))
    for _ in range(3):
        with engine.runtime.autocast():
            logits = net(images)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, stream


def train_beside_one_process():
    """Each process has the same images, so that the mean of their gradients is the gradient, to the last bit."""
    runtime = Runtime("bf16")
    alone, stream = train(Parallel(runtime))
    assert set(stream) == {torch.float32} and alone[2] < alone[0]
    for number, (name, how) in enumerate(AS_ALONE + ROUNDED):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # keys of its own in the store that all share
        with parallel.create(name, runtime, **how) as engine:
            losses, found = train(engine)
        case = f"{name} {how}: {losses}, alone {alone}; stream {found}"
        if (name, how) in AS_ALONE:
            assert found == stream, case
            assert losses == alone, case
        else:
            assert set(found) == {torch.bfloat16}, case
            assert losses == pytest.approx(alone, rel=4e-3), case  # 2**-8, of numbers rounded to 8 bits


def test_everything_is_calculated_as_on_one_process_but_what_is_gathered_in_bf16(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", train_beside_one_process)
    assert ranks.finish() == [0, 0], ranks.said()


def train_compiled():
    """The compiler forgets between the two: code that it compiles once more, it lets have varying sizes."""
    runtime = Runtime("bf16")
    with parallel.create("fsdp", runtime, overlap=False) as engine:
        losses = train(engine, compiled=True)
        torch._dynamo.reset()
        assert losses == train(Parallel(runtime), compiled=True)


def test_compiled_as_a_whole_too_it_is_calculated_as_on_one_process(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", train_compiled)
    assert ranks.finish(600) == [0, 0], ranks.said()


@pytest.mark.parametrize(("setting", "known"), [("reduce", "bf16, fp32"), ("gather", "auto, bf16, fp32")])
def test_an_unknown_precision_is_an_error_that_names_the_setting(setting, known):
    with pytest.raises(UsageError, match=rf"unknown parallel.{setting} 'fp16'; known: {known}"):
        parallel.create("none", Runtime(), **{setting: "fp16"})


@pytest.mark.parametrize("gather", ["auto", "fp32"])
def test_one_process_takes_settings_that_are_for_fsdp(gather):
    assert type(parallel.create("none", Runtime(), gather=gather)) is Parallel


def test_gathering_in_bf16_is_for_fsdp_in_bf16():
    for name, precision in (("fsdp", "fp32"), ("ddp", "bf16"), ("auto", "bf16")):
        with pytest.raises(UsageError, match=rf"gather=bf16 is for .*; this is parallel={name} with .* {precision}"):
            parallel.create(name, Runtime(precision), gather="bf16")


@pytest.mark.parametrize("gather", ["auto", "fp32"])
def test_xla_takes_settings_that_are_for_fsdp(monkeypatch, gather):
    monkeypatch.setattr(parallel, "_spmd", lambda name, *_: name)
    runtime = Runtime("bf16")
    runtime.name = "xla"
    assert parallel.create("fsdp", runtime, gather=gather) == "fsdp"


@pytest.mark.parametrize("setting", [{"overlap": True}, {"reduce": "bf16"}, {"reshard": True}, {"send": "copy"}])
def test_what_xla_would_not_heed_is_refused(setting):
    runtime = Runtime("fp32")
    runtime.name = "xla"
    with pytest.raises(UsageError, match="XLA decides"):
        parallel.create("ddp", runtime, **setting)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("none", {"overlap": True}, "none averages no gradients: .*; got overlap=True and reduce=fp32"),
        ("none", {"reduce": "bf16"}, "none averages no gradients: .*; got overlap=auto and reduce=bf16"),
        ("ddp", {"reshard": True}, "reshard=true is for parallel=fsdp; for parallel=ddp"),
    ],
)
def test_what_an_engine_would_not_heed_is_refused(name, setting, message):
    with pytest.raises(UsageError, match=message):
        parallel.create(name, Runtime(), **setting)


def test_gradients_may_be_clipped_that_are_listed_once():
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    norm = Parallel(Runtime()).clip_gradients(layer.parameters(), limit=0.5)
    assert norm > 1
    torch.testing.assert_close(torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()]), torch.tensor(0.5))
