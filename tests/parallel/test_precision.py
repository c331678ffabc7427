"""Training in bfloat16 on several processes matches one process, unless gather="bf16" rounds all parameters."""

import os

import pytest
import torch
from expecting import error
from ranks import Ranks
from timm.models import VisionTransformer
from torch.nn import functional as F

from vitkernels import parallel
from vitkernels.parallel.base import Parallel
from vitkernels.runtime.base import Runtime

EXACT = [("ddp", {})]
EXACT += [("fsdp", {"overlap": o, "gather": gather}) for o in (True, False) for gather in ("auto", "fp32")]
ROUNDED = [("fsdp", {"overlap": overlap, "gather": "bf16"}) for overlap in (True, False)]


def train(engine, compiled=False):
    """Return the losses of three steps, and the residual stream's dtypes before each block and after the last."""
    torch.manual_seed(0)
    depth = 1 if compiled else 2  # compilation is slow
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


def train_alongside_one_process():
    """All processes have the same images, so the mean of their gradients is bit-equal to each."""
    runtime = Runtime("bf16")
    alone, stream = train(Parallel(runtime))
    assert set(stream) == {torch.float32} and alone[2] < alone[0]
    for number, (name, settings) in enumerate(EXACT + ROUNDED):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # separate keys in the shared store
        with parallel.create(name, runtime, **settings) as engine:
            losses, found = train(engine)
        case = f"{name} {settings}: {losses}, alone {alone}; stream {found}"
        if (name, settings) in EXACT:
            assert found == stream, case
            assert losses == alone, case
        else:
            assert set(found) == {torch.bfloat16}, case
            assert losses == pytest.approx(alone, rel=4e-3), case  # 2**-8: numbers rounded to 8 bits


def test_losses__equal_one_process_unless_gathered_in_bf16(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", train_alongside_one_process)
    assert ranks.finish() == [0, 0], ranks.output()


def train_compiled():
    """Dynamo is reset in between, since it recompiles seen code with dynamic sizes."""
    runtime = Runtime("bf16")
    with parallel.create("fsdp", runtime, overlap=False) as engine:
        losses = train(engine, compiled=True)
        torch._dynamo.reset()
        assert losses == train(Parallel(runtime), compiled=True)


@pytest.mark.slow
def test_losses__equal_one_process_when_compiled_as_one_graph(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", train_compiled)
    assert ranks.finish(600) == [0, 0], ranks.output()


@pytest.mark.parametrize(("setting", "known"), [("reduce", ["bf16", "fp32"]), ("gather", ["auto", "bf16", "fp32"])])
def test_unknown_precision__lists_the_known_ones(setting, known):
    with error("unknown_name", name="fp16", choices=known) as refused:
        parallel.create("none", Runtime(), **{setting: "fp16"})
    assert refused.value.fields["kind"] == f"parallel {setting}"


@pytest.mark.parametrize("gather", ["auto", "fp32"])
def test_none__accepts_harmless_fsdp_settings(gather):
    assert type(parallel.create("none", Runtime(), gather=gather)) is Parallel


def test_gather_bf16__needs_fsdp_and_bf16():
    for name, precision in (("fsdp", "fp32"), ("ddp", "bf16"), ("auto", "bf16")):
        with error("parallel.setting", setting="gather", value="bf16", strategy=name):
            parallel.create(name, Runtime(precision), gather="bf16")


@pytest.mark.parametrize("gather", ["auto", "fp32"])
def test_xla__accepts_harmless_fsdp_settings(monkeypatch, gather):
    monkeypatch.setattr(parallel.factory, "_create_spmd", lambda name, *_: name)
    runtime = Runtime("bf16")
    runtime.name = "xla"
    assert parallel.create("fsdp", runtime, gather=gather) == "fsdp"


@pytest.mark.parametrize("setting", [{"overlap": True}, {"reduce": "bf16"}, {"reshard": True}, {"send": "copy"}])
def test_xla__refuses_settings_that_it_would_ignore(setting):
    runtime = Runtime("fp32")
    runtime.name = "xla"
    ((name, value),) = setting.items()
    with error("parallel.setting", strategy="xla", setting=name, value=value):
        parallel.create("ddp", runtime, **setting)


@pytest.mark.parametrize(
    ("strategy", "setting", "value"),
    [("none", "overlap", True), ("none", "reduce", "bf16"), ("ddp", "reshard", True)],
)
def test_strategy__refuses_settings_that_it_would_ignore(strategy, setting, value):
    with error("parallel.setting", strategy=strategy, setting=setting, value=value):
        parallel.create(strategy, Runtime(), **{setting: value})


@pytest.mark.parametrize(("setting", "value"), [("lost_after", 2.9), ("overlap", "yes")])
def test_create__refuses_values_out_of_range(setting, value):
    with error("parallel.value", setting=setting, value=value):
        parallel.create("none", Runtime(), **{setting: value})


def test_reshard__refused_without_overlap():
    with error("parallel.setting", strategy="fsdp", setting="reshard"):
        parallel.create("fsdp", Runtime(), reshard=True, overlap=False)


def test_none__refuses_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with error("parallel.world", world=2) as refused:
        parallel.create("none", Runtime())
    assert str(refused.value) == "strategy none runs one process, but torchrun started 2: use ddp or fsdp"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_torchrun_strategy__refuses_a_process_that_torchrun_did_not_start(strategy):
    with error("parallel.launch"):
        parallel.create(strategy, Runtime())


def test_clip_gradients__takes_an_iterator():
    layer = torch.nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    norm = Parallel(Runtime()).clip_gradients(layer.parameters(), limit=0.5)
    assert norm > 1
    torch.testing.assert_close(torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()]), torch.tensor(0.5))
