"""AdamW's kernel against torch's AdamW in float64, and the ways its numbers come in: scaler, clipping, state dicts."""

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


def made(kind, device="cpu", dtype=torch.float32, **options):
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
def test_steps_are_those_of_torch_in_float64(device):
    ours, exact = made(adamw.AdamW, device), made(torch.optim.AdamW, device, torch.float64)
    for step in range(5):
        give_gradients(step, ours, exact, skipped=(2,) if step == 0 else (0, 4) if step == 2 else ())
        for optimizer in (ours, exact):
            optimizer.param_groups[1]["lr"] *= 0.9
            optimizer.step()
    assert_close(ours, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_may_begin_anywhere(device):
    """As views into DDP's buckets do."""
    ours, exact = made(adamw.AdamW, device), made(torch.optim.AdamW, device, torch.float64)
    for step in range(2):
        give_gradients(step, ours, exact)
        for p in parameters_of(ours):
            p.grad = torch.cat([p.grad.new_zeros(1), p.grad.flatten()])[1:].view_as(p)
        ours.step()
        exact.step()
    assert_close(ours, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_a_scaler_s_factor_is_taken_off_and_inf_skips_the_step(device):
    ours, exact = made(adamw.AdamW, device), made(torch.optim.AdamW, device, torch.float64)
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


def test_grad_scaler_works_with_it():
    ours, exact = made(adamw.AdamW), made(torch.optim.AdamW, dtype=torch.float64)
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
def test_clipping_hands_the_factor_over_and_leaves_gradients_as_they_are(device):
    parallel = base.Parallel(Runtime())
    ours, theirs = made(adamw.AdamW, device), made(torch.optim.AdamW, device, torch.float64)
    for step, limit in enumerate((1.0, 1e9, None, 0.1)):
        give_gradients(step, ours, theirs)
        before = [p.grad.clone() for p in parameters_of(ours)]
        norms = [parallel.clip_gradients(parameters_of(o), limit, o).item() for o in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters_of(ours), before, strict=True))
        ours.step()
        theirs.step()
    assert_close(ours, theirs)


def test_a_norm_that_is_not_a_number_is_seen_in_the_weights():
    ours = made(adamw.AdamW)
    give_gradients(0, ours)
    ours.clip_next_step(torch.tensor(float("nan")), 1.0)
    ours.step()
    assert parameters_of(ours)[0].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", [{"fused": True}, {}], ids=["fused", "plain"])
def test_state_dicts_go_both_ways(device, options):
    """torch's -> ours -> torch's, each going on where the other stopped."""
    exact = made(torch.optim.AdamW, device, torch.float64)
    chain = [made(torch.optim.AdamW, device, **options), made(adamw.AdamW, device), made(adamw.AdamW, device)]
    chain.append(made(torch.optim.AdamW, device, **options))
    for step, optimizer in enumerate(chain):
        if step:
            optimizer.load_state_dict(copy.deepcopy(chain[step - 1].state_dict()))
            for p, q in zip(parameters_of(optimizer), parameters_of(chain[step - 1]), strict=True):
                p.data.copy_(q.data)
        give_gradients(step, optimizer, exact)
        optimizer.step()
        exact.step()
    assert_close(chain[-1], exact)
    ours, theirs = chain[1].state_dict(), made(torch.optim.AdamW, device, fused=True).state_dict()
    assert [group.keys() for group in ours["param_groups"]] == [group.keys() for group in theirs["param_groups"]]


def test_what_a_new_state_holds_is_what_torch_s_fused_one_holds():
    ours, theirs = made(adamw.AdamW), made(torch.optim.AdamW, fused=True)
    give_gradients(0, ours, theirs, skipped=(1,))
    ours.step()
    theirs.step()
    a, b = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert a.keys() == b.keys()
    for number, entries in b.items():
        assert list(a[number]) == list(entries)
        assert all(a[number][name].dtype == value.dtype for name, value in entries.items())
        assert all(a[number][name].shape == value.shape for name, value in entries.items())


def test_a_closure_gives_its_loss():
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
    "options", [{"amsgrad": True}, {"maximize": True}, {"capturable": True}, {"fused": False}], ids=str
)
def test_options_without_a_kernel_are_refused(options):
    with pytest.raises(UsageError, match="take torch"):
        adamw.AdamW([nn.Parameter(torch.ones(3))], **options)


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.bfloat16), torch.ones(3, 2).T,
     torch.ones(3, dtype=torch.complex64), torch.ones(3, device="meta")],
    ids=["float64", "bfloat16", "transposed", "complex", "meta"],
)  # fmt: skip
def test_parameters_without_a_kernel_are_refused(tensor):
    with pytest.raises(UsageError, match="cannot take a parameter"):
        adamw.AdamW([nn.Parameter(tensor)])
    optimizer = adamw.AdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(UsageError, match="cannot take a parameter"):
        optimizer.add_param_group({"params": [nn.Parameter(tensor)]})


@pytest.mark.parametrize("grad", [torch.ones(3, 2).T, torch.ones(2, 3).to_sparse()], ids=["transposed", "sparse"])
def test_gradients_without_a_kernel_are_refused(grad):
    x = nn.Parameter(torch.ones(2, 3))
    x.grad = grad
    with pytest.raises(UsageError, match="contiguous float32 gradients"):
        adamw.AdamW([x]).step()


@pytest.mark.parametrize(
    "optimizer, reason, word",
    [
        (made(torch.optim.AdamW), "optim.kernel.device", "NVIDIA"),
        (torch.optim.SGD([nn.Parameter(torch.ones(3))]), "optim.kernel.class", "SGD"),
    ],
    ids=["device", "class"],
)
def test_with_kernel__unsupported_falls_back_with_auto_and_raises_with_triton(caplog, optimizer, reason, word):
    assert with_kernel(optimizer, "eager") is optimizer
    assert not caplog.text
    with caplog.at_level("INFO", "vitkernels"):
        assert with_kernel(optimizer, "auto") is optimizer
    assert word in caplog.text
    with error("optim.kernel", kernel="triton") as caught:
        with_kernel(optimizer, "triton")
    assert caught.value.__cause__.code == reason
    assert word in str(caught.value)


@pytest.mark.gpu
def test_on_a_gpu_adamw_gets_the_kernel_with_all_its_settings(caplog):
    theirs = made(torch.optim.AdamW, "cuda", fused=True)
    ours = with_kernel(theirs, "triton")
    assert type(ours) is adamw.AdamW
    assert ours.state_dict() == theirs.state_dict()
    refused = made(torch.optim.AdamW, "cuda", amsgrad=True)
    with caplog.at_level("INFO", "vitkernels"):
        assert with_kernel(refused, "auto") is refused
    assert "amsgrad" in caplog.text


def test_a_first_group_without_parameters():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = adamw.AdamW([{"params": []}, {"params": [parameter]}])
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert (parameter < 1).all()


def test_foreach_is_torchs():
    with pytest.raises(UsageError, match="foreach"):
        adamw.AdamW([nn.Parameter(torch.ones(3))], foreach=True)
