"""AdamW's kernel against torch's AdamW in float64, with a GradScaler, clipping and state dicts."""

import copy

import pytest
import torch
from expecting import error
from torch import nn

from vitkernels.errors import UsageError
from vitkernels.optim import with_kernel
from vitkernels.parallel import base
from vitkernels.runtime.base import Runtime

pytest.importorskip("triton")
from vitkernels.optim import adamw

SHAPES = (1,), (3,), (1000,), (4097,), (3, 5), (0,)
DEVICES = "cpu", pytest.param("cuda", marks=pytest.mark.gpu)


def groups_of(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    p = [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]
    return [
        {"params": p[:2], "weight_decay": 0.0, "lr": 1e-2, "betas": (0.8, 0.95)},
        {"params": p[2:4], "lr": 3e-3, "eps": 1e-4},
        {"params": p[4:]},
    ]


def build(kind, device="cpu", dtype=torch.float32, **options):
    return kind(groups_of(device, dtype), lr=1e-3, weight_decay=0.05, **options)


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(step, *optimizers, skipped=(), scale=1.0):
    generator = torch.Generator().manual_seed(step)
    grads = [scale * torch.randn(shape, generator=generator) for shape in SHAPES]
    for optimizer in optimizers:
        for i, (p, grad) in enumerate(zip(parameters_of(optimizer), grads, strict=True)):
            p.grad = None if i in skipped else grad.to(p)


def assert_close(ours, other, tolerance=1e-6):
    for p, q in zip(parameters_of(ours), parameters_of(other), strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=tolerance, atol=tolerance)
        if q in other.state:
            mine, its = ours.state[p], other.state[q]
            assert mine["step"].item() == its["step"].item()
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(mine[name].double(), its[name].double(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_step__matches_torch_in_float64(device):
    ours, exact = build(adamw.AdamW, device), build(torch.optim.AdamW, device, torch.float64)
    for step in range(5):
        give_gradients(step, ours, exact, skipped=(2,) if step == 0 else (0, 4) if step == 2 else ())
        for optimizer in (ours, exact):
            optimizer.param_groups[1]["lr"] *= 0.9
            optimizer.step()
    assert_close(ours, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_step__accepts_unaligned_gradients(device):
    """Views into DDP's buckets start at any element."""
    ours, exact = build(adamw.AdamW, device), build(torch.optim.AdamW, device, torch.float64)
    for step in range(2):
        give_gradients(step, ours, exact)
        for p in parameters_of(ours):
            p.grad = torch.cat([p.grad.new_zeros(1), p.grad.flatten()])[1:].view_as(p)
        ours.step()
        exact.step()
    assert_close(ours, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_grad_scale__unscales_and_overflow_skips_the_step(device):
    ours, exact = build(adamw.AdamW, device), build(torch.optim.AdamW, device, torch.float64)
    ours.grad_scale, ours.found_inf = (torch.full((), x, device=device) for x in (1024.0, 0.0))
    for step in range(2):
        give_gradients(step, exact)
        give_gradients(step, ours, scale=1024.0)
        ours.step()
        exact.step()
    ours.found_inf.fill_(1.0)
    give_gradients(2, ours, scale=float("inf"))
    ours.step()
    assert_close(ours, exact)
    ours.found_inf.fill_(0.0)
    give_gradients(3, exact)
    give_gradients(3, ours, scale=1024.0)
    ours.step()
    exact.step()
    assert_close(ours, exact)


def test_grad_scaler__scales_and_skips_as_with_torch():
    ours, exact = build(adamw.AdamW), build(torch.optim.AdamW, dtype=torch.float64)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(torch.ones(()))
    for step, scale in enumerate((256.0, float("inf"), 128.0)):  # inf halves the scale
        give_gradients(step, ours, scale=scale)
        scaler.step(ours)
        scaler.update()
        if step != 1:
            give_gradients(step, exact)
            exact.step()
    assert_close(ours, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_clip_next_step__matches_clip_grad_norm_and_keeps_gradients(device):
    parallel = base.Parallel(Runtime())
    ours, theirs = build(adamw.AdamW, device), build(torch.optim.AdamW, device, torch.float64)
    for step, limit in enumerate((1.0, 1e9, None, 0.1)):
        give_gradients(step, ours, theirs)
        before = [p.grad.clone() for p in parameters_of(ours)]
        norms = [parallel.clip_gradients(parameters_of(o), limit, o).item() for o in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters_of(ours), before, strict=True))
        ours.step()
        theirs.step()
    assert_close(ours, theirs)


def test_clip_next_step__nan_norm_reaches_the_weights():
    ours = build(adamw.AdamW)
    give_gradients(0, ours)
    ours.clip_next_step(torch.tensor(float("nan")), 1.0)
    ours.step()
    assert parameters_of(ours)[0].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"fused": True}, {}], ids=["fused", "plain"])
def test_state_dict__continues_in_either_implementation(device, options):
    """torch's -> ours -> ours -> torch's, one step each."""
    exact = build(torch.optim.AdamW, device, torch.float64)
    chain = [build(torch.optim.AdamW, device, **options), build(adamw.AdamW, device), build(adamw.AdamW, device)]
    chain.append(build(torch.optim.AdamW, device, **options))
    for step, optimizer in enumerate(chain):
        if step:
            optimizer.load_state_dict(copy.deepcopy(chain[step - 1].state_dict()))
            for p, q in zip(parameters_of(optimizer), parameters_of(chain[step - 1]), strict=True):
                p.data.copy_(q.data)
        give_gradients(step, optimizer, exact)
        optimizer.step()
        exact.step()
    assert_close(chain[-1], exact)
    ours, theirs = chain[1].state_dict(), build(torch.optim.AdamW, device, fused=True).state_dict()
    assert [group.keys() for group in ours["param_groups"]] == [group.keys() for group in theirs["param_groups"]]


def test_state__has_the_entries_of_torch_fused_adamw():
    ours, theirs = build(adamw.AdamW), build(torch.optim.AdamW, fused=True)
    give_gradients(0, ours, theirs, skipped=(1,))
    ours.step()
    theirs.step()
    a, b = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert a.keys() == b.keys()
    for number, entries in b.items():
        assert list(a[number]) == list(entries)
        assert all(a[number][name].dtype == value.dtype for name, value in entries.items())
        assert all(a[number][name].shape == value.shape for name, value in entries.items())


def test_step__returns_the_loss_of_the_closure():
    x = nn.Parameter(torch.ones(3))
    optimizer = adamw.AdamW([x], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (x * x).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (x < 1).all()


@pytest.mark.parametrize(
    "options",
    [{"amsgrad": True}, {"maximize": True}, {"capturable": True}, {"fused": False}, {"foreach": True}],
    ids=str,
)
def test_constructor__rejects_unsupported_options(options):
    ((name, value),) = options.items()
    with error("optim.kernel.option", option=f"{name}={value}"):
        adamw.AdamW([nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, 2).T,
     torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta")],
    ids=["float64", "bfloat16", "transposed", "complex", "meta"],
)  # fmt: skip
def test_parameters__unsupported_are_rejected(tensor):
    with error("optim.kernel.parameter"):
        adamw.AdamW([nn.Parameter(tensor)])
    optimizer = adamw.AdamW([nn.Parameter(torch.ones(3))])
    with error("optim.kernel.parameter"):
        optimizer.add_param_group({"params": [nn.Parameter(tensor)]})


@pytest.mark.parametrize("grad", [torch.ones(3, 2).T, torch.ones(2, 3).to_sparse()], ids=["transposed", "sparse"])
def test_gradients__unsupported_are_rejected(grad):
    x = nn.Parameter(torch.ones(2, 3))
    x.grad = grad
    with error("optim.kernel.gradient"):
        adamw.AdamW([x]).step()


@pytest.mark.parametrize(
    "optimizer, reason, word",
    [
        (build(torch.optim.AdamW), "optim.kernel.device", "NVIDIA"),
        (torch.optim.SGD([nn.Parameter(torch.ones(3))]), "optim.kernel.class", "SGD"),
    ],
    ids=["device", "class"],
)
def test_with_kernel__unsupported_falls_back_with_auto_and_raises_with_triton(caplog, optimizer, reason, word):
    assert with_kernel(optimizer, "eager") is optimizer
    assert not caplog.text
    with caplog.at_level("INFO", "vitkernels"):
        assert with_kernel(optimizer, "auto") is optimizer
    assert (word in caplog.text) == (reason == "optim.kernel.class")  # a missing GPU is not worth a log line
    with error("optim.kernel", kernel="triton") as caught:
        with_kernel(optimizer, "triton")
    assert caught.value.__cause__.code == reason
    assert word in str(caught.value)


@pytest.mark.gpu
def test_with_kernel__on_a_gpu_keeps_all_settings(caplog):
    theirs = build(torch.optim.AdamW, "cuda", fused=True)
    ours = with_kernel(theirs, "triton")
    assert type(ours) is adamw.AdamW
    assert ours.state_dict() == theirs.state_dict()
    refused = build(torch.optim.AdamW, "cuda", amsgrad=True)
    with caplog.at_level("INFO", "vitkernels"):
        assert with_kernel(refused, "auto") is refused
    assert "amsgrad" in caplog.text


def test_param_groups__first_may_be_empty():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = adamw.AdamW([{"params": []}, {"params": [parameter]}])
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert (parameter < 1).all()


@pytest.mark.gpu
def test_parameters__of_two_devices_are_rejected():
    parameters = [nn.Parameter(torch.ones(3, device=device)) for device in ("cpu", "cuda")]
    with error("optim.kernel.parameter", reason="parameters must be on one device, got cpu, cuda:0"):
        adamw.AdamW(parameters)


def test_with_kernel__message():
    """A snapshot of the wording."""
    with pytest.raises(UsageError) as caught:
        with_kernel(torch.optim.SGD([nn.Parameter(torch.ones(3))]), "triton")
    reason = "the kernel implements torch.optim.AdamW, got SGD"
    assert str(caught.value) == f'kernel="triton" is not supported here: {reason}; kernel="auto" falls back to torch'
