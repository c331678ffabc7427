"""AdamW for all parameters in two launches, with gradient clipping and loss scaling folded into the one pass.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the form of Kingma and Ba
(arXiv 1412.6980, section 2) with one division per element.
Shape suffixes: N parameters, G groups, B blocks of BLOCK elements of one parameter.
"""

from array import array
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from vitkernels.bridge.triton import cdiv, triton_call
from vitkernels.errors import UsageError

BLOCK = 1024  # elements of a program
_PARAMETERS_AT_ONCE = 64  # of a program that prepares


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) in one pass over the memory: same arguments, state dict, and results to rounding.

    Parameters: float32, contiguous, all on one NVIDIA GPU (or on the CPU, where Triton's interpreter is slow). Their
    gradients are read and never written, neither for a GradScaler (`grad_scale` and `found_inf`, as torch's fused
    optimizers take them) nor for `clip_next_step`. No step waits for the device.

    Raises UsageError (a ValueError): parameters or gradients that it cannot take, amsgrad, maximize, capturable,
    differentiable, foreach, or fused=False; when it is made, given a group, or given a state dict that asks for them.
    Gradients, and a CUDA graph that would capture it, when it steps.
    """

    _step_supports_amp_scaling = True
    _clip: tuple[Tensor | None, float] = (None, 0.0)

    def __init__(self, params, *args, fused: bool | None = None, **keywords):
        if fused is False:
            raise UsageError("this AdamW is one fused kernel; for fused=False take torch.optim.AdamW")
        if keywords.get("foreach"):
            raise UsageError("this AdamW is one fused kernel; for foreach=True take torch.optim.AdamW")
        super().__init__(params, *args, fused=True, **keywords)

    def clip_next_step(self, norm: Tensor, limit: float) -> None:
        """Let the next step alone multiply gradients with min(1, limit / (norm + 1e-6)), as clip_grad_norm_ would.

        norm: of all gradients together, a float32 scalar on their device, after a GradScaler's scale is taken off.
        """
        self._clip = norm, float(limit)

    @torch.no_grad()
    def step(self, closure=None):
        """One step over all parameters that have gradients; the closure's loss, as torch's step gives it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip, self._clip = self._clip, (None, 0.0)
        addresses, sizes, counts = [], [], []
        for group in self.param_groups:
            before = len(sizes)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    addresses += self._addresses(parameter, parameter.grad)
                    sizes.append(parameter.numel())
            counts.append(len(sizes) - before)
        if sizes:
            settings = [
                float(setting)
                for group in self.param_groups
                for setting in (group["lr"], group["weight_decay"], *group["betas"], group["eps"])
            ]
            scaling = getattr(self, "grad_scale", None), getattr(self, "found_inf", None), *clip
            device = next(parameter.device for group in self.param_groups for parameter in group["params"])
            _step(addresses, settings, _layout(tuple(sizes), tuple(counts), BLOCK, device), scaling, device)
        return loss

    def _addresses(self, parameter: Tensor, grad: Tensor) -> tuple[int, ...]:
        """Asked for at every step: gradients are new ones, and who sets a parameter's data or state says nothing."""
        if grad.dtype is not torch.float32 or grad.layout is not torch.strided or not grad.is_contiguous():
            raise UsageError(f"AdamW's kernel takes contiguous float32 gradients; got {_kind(grad)}")
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return (
            parameter.data_ptr(), grad.data_ptr(), state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr(),
            state["step"].data_ptr(),
        )  # fmt: skip

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        self._check()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None  # a state dict brings the settings of who wrote it
            for parameter in group["params"]:
                entries = self.state.get(parameter, {})
                for name, value in entries.items():
                    entries[name] = value.to(parameter.device, torch.float32).contiguous()
        self._check()

    def _check(self) -> None:
        groups = self.param_groups
        for name in ("amsgrad", "maximize", "capturable", "differentiable"):
            if any(group[name] for group in groups):
                raise UsageError(f"AdamW's kernel has no {name}; take torch.optim.AdamW")
        parameters = [parameter for group in groups for parameter in group["params"]]
        for parameter in parameters:
            if reason := unsupported(parameter):
                raise UsageError(f"AdamW's kernel cannot take a parameter: {reason}; take torch.optim.AdamW")
        devices = sorted({str(parameter.device) for parameter in parameters})
        if len(devices) > 1:
            raise UsageError(f"AdamW's kernel takes parameters of one device, got {', '.join(devices)}")


def unsupported(parameter: Tensor) -> str | None:
    """Why the kernel cannot take this parameter; None when it can."""
    if type(parameter) not in (Tensor, nn.Parameter):
        return f"it is a {type(parameter).__name__}, which is not plain memory"
    if parameter.device.type not in ("cuda", "cpu"):
        return f"Triton runs on NVIDIA GPUs, and interpreted on CPUs; it is on {parameter.device}"
    if parameter.dtype is not torch.float32 or parameter.layout is not torch.strided or not parameter.is_contiguous():
        return f"it must be contiguous float32, and is {_kind(parameter)}"
    return None


def _kind(tensor: Tensor) -> str:
    strides = f", strides {tuple(tensor.stride())}" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{strides}"


# --- launches ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _layout(sizes: tuple[int, ...], counts: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, ...]:
    """sizes_N, group_N and blocks_B2 (parameter, block within it) for parameters of these sizes, `counts` per group."""
    sizes_N = torch.tensor(sizes)
    blocks_N = (sizes_N + block - 1) // block
    parameter_B = torch.repeat_interleave(blocks_N)
    first_B = (blocks_N.cumsum(0) - blocks_N)[parameter_B]
    blocks_B2 = torch.stack([parameter_B, torch.arange(len(parameter_B)) - first_B], 1).int()
    group_N = torch.repeat_interleave(torch.tensor(counts)).int()
    return sizes_N.to(device), group_N.to(device), blocks_B2.to(device)


def _upload(values: list, kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A device tensor of them that the host does not wait for; the pinned copy lives until it is read."""
    host = torch.frombuffer(array(kind, values), dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _step(addresses: list[int], settings: list[float], layout: tuple[Tensor, ...], scaling: tuple, device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UsageError(
            "AdamW's kernel cannot be captured in a CUDA graph: a replay would read addresses of this step"
        )
    sizes_N, group_N, blocks_B2 = layout
    N, B = len(sizes_N), len(blocks_B2)
    table_N5 = _upload(addresses, "q", torch.int64, device)
    settings_G5 = _upload(settings, "d", torch.float64, device)
    scalars_N8 = torch.empty(N, 8, device=device)
    triton_call(
        table_N5, settings_G5, group_N, scalars_N8, *scaling, N,
        kernel=_prepare_kernel, grid=(cdiv(N, _PARAMETERS_AT_ONCE),), BLOCK=_PARAMETERS_AT_ONCE, num_warps=1,
    )  # fmt: skip
    if B:
        triton_call(table_N5, scalars_N8, sizes_N, blocks_B2, kernel=_step_kernel, grid=(B,), BLOCK=BLOCK, num_warps=4)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _prepare_kernel(
    table_N5, settings_G5, group_N, scalars_N8, grad_scale, found_inf, norm, limit, N, BLOCK: tl.constexpr
):  # fmt: skip
    """Counts the step, and leaves each parameter's numbers for it; without a gradient's address it is passed over.

    Bias corrections are differences of nearly equal numbers: float64.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = n < N
    factor = 1.0
    if grad_scale is not None:
        factor = tl.div_rn(1.0, tl.load(grad_scale))
    if norm is not None:
        coefficient = tl.div_rn(limit, tl.load(norm) + 1e-6)
        factor *= tl.where(coefficient > 1.0, 1.0, coefficient)  # stays NaN, as min would not
    count = tl.load(table_N5 + 5 * n + 4, mask=keep, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(count, mask=keep, other=0.0) + 1.0
    if found_inf is None:
        tl.store(count, step, mask=keep)
    else:
        skipped = tl.load(found_inf) > 0.0
        tl.store(count, tl.where(skipped, step - 1.0, step), mask=keep)
        grad = tl.load(table_N5 + 5 * n + 1, mask=keep, other=0)
        tl.store(table_N5 + 5 * n + 1, tl.where(skipped, 0, grad), mask=keep)
    setting = settings_G5 + 5 * tl.load(group_N + n, mask=keep, other=0)
    lr, weight_decay = tl.load(setting), tl.load(setting + 1)
    beta1, beta2, eps = tl.load(setting + 2), tl.load(setting + 3), tl.load(setting + 4)
    root = tl.sqrt(1.0 - tl.exp(step.to(tl.float64) * tl.log(beta2)))
    rate = lr * root / (1.0 - tl.exp(step.to(tl.float64) * tl.log(beta1)))
    scalars = scalars_N8 + 8 * n
    tl.store(scalars, lr * weight_decay, mask=keep)
    tl.store(scalars + 1, beta1, mask=keep)
    tl.store(scalars + 2, 1.0 - beta1, mask=keep)
    tl.store(scalars + 3, beta2, mask=keep)
    tl.store(scalars + 4, 1.0 - beta2, mask=keep)
    tl.store(scalars + 5, rate, mask=keep)
    tl.store(scalars + 6, eps * root, mask=keep)
    tl.store(scalars + 7, tl.zeros([BLOCK], tl.float32) + factor, mask=keep)


@triton.jit
def _step_kernel(table_N5, scalars_N8, sizes_N, blocks_B2, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    n = tl.load(blocks_B2 + 2 * block)
    start = tl.load(blocks_B2 + 2 * block + 1).to(tl.int64) * BLOCK
    row = table_N5 + 5 * n
    param, grad = tl.load(row), tl.load(row + 1)
    exp_avg, exp_avg_sq = tl.load(row + 2), tl.load(row + 3)
    if grad != 0:
        scalars = scalars_N8 + 8 * n
        left = tl.load(sizes_N + n) - start
        aligned = ((param | grad | exp_avg | exp_avg_sq) & 15) == 0
        if aligned & (left >= BLOCK):  # 16 bytes at once; views into DDP's buckets can begin anywhere
            _update(param, grad, exp_avg, exp_avg_sq, scalars, start, None, BLOCK)
        else:
            _update(param, grad, exp_avg, exp_avg_sq, scalars, start, left, BLOCK)


@triton.jit
def _elements(address, start, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(tl.float32)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + tl.arange(0, BLOCK)


@triton.jit
def _update(param, grad, exp_avg, exp_avg_sq, scalars, start, left, BLOCK: tl.constexpr):
    """A block of a parameter from `start` on; left: elements that it has, None for a whole one at aligned addresses."""
    whole: tl.constexpr = left is None
    keep = None if whole else tl.arange(0, BLOCK) < left
    param, grad = _elements(param, start, BLOCK, whole), _elements(grad, start, BLOCK, whole)
    exp_avg, exp_avg_sq = _elements(exp_avg, start, BLOCK, whole), _elements(exp_avg_sq, start, BLOCK, whole)
    g = tl.load(grad, mask=keep) * tl.load(scalars + 7)
    m = tl.load(exp_avg, mask=keep)
    v = tl.load(exp_avg_sq, mask=keep)
    p = tl.load(param, mask=keep)
    m = tl.load(scalars + 1) * m + tl.load(scalars + 2) * g
    v = tl.load(scalars + 3) * v + tl.load(scalars + 4) * (g * g)
    moved = tl.div_rn(tl.load(scalars + 5) * m, tl.sqrt_rn(v) + tl.load(scalars + 6))
    # Decay is taken off here, and not by a factor of 1 - lr·weight_decay, whose rounding would be the same every step.
    tl.store(param, p - (tl.load(scalars) * p + moved), mask=keep)
    tl.store(exp_avg, m, mask=keep)
    tl.store(exp_avg_sq, v, mask=keep)
