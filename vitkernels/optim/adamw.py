"""AdamW over all parameters in two kernel launches, with gradient clipping and loss unscaling fused into one pass.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101), in the form of Kingma and Ba
(arXiv 1412.6980, section 2), which needs one division per element.
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

BLOCK = 1024  # elements per program
_PARAMETERS_PER_PROGRAM = 64  # of _prepare_kernel


class AdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) in one pass over memory: same arguments and state dict; results equal to rounding.

    Parameters must be contiguous float32, all on one NVIDIA GPU (or on the CPU, in Triton's slow interpreter).
    Gradients are read and never written: not to unscale for a GradScaler, which passes `grad_scale` and `found_inf` as
    it does to torch's fused optimizers, and not to clip (`clip_next_step`). A step does not wait for the device.

    Raises:
        UsageError: "optim.kernel.option" for amsgrad, maximize, capturable, differentiable, foreach or fused=False, and
            "optim.kernel.parameter" for unsupported parameters, from the constructor, add_param_group and
            load_state_dict; "optim.kernel.gradient" for unsupported gradients and "optim.kernel.capture" during CUDA
            graph capture, from step.
    """

    _step_supports_amp_scaling = True
    _clip: tuple[Tensor | None, float] = (None, 0.0)

    def __init__(self, params, *args, fused: bool | None = None, **keywords):
        if fused is False:
            raise _unsupported_option("fused=False")
        if keywords.get("foreach"):
            raise _unsupported_option("foreach=True")
        super().__init__(params, *args, fused=True, **keywords)

    def clip_next_step(self, norm: Tensor, limit: float) -> None:
        """Make the next step, and only that, scale gradients by min(1, limit / (norm + 1e-6)), as clip_grad_norm_ does.

        norm: global norm of the unscaled gradients, a float32 scalar tensor on their device.
        """
        self._clip = norm, float(limit)

    @torch.no_grad()
    def step(self, closure=None):
        """Update all parameters that have gradients, and return the closure's loss, as torch's step does."""
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
        """Return the addresses that the kernel reads. Not cached: gradients are reallocated, and a parameter's data
        or state may be replaced at any time.
        """
        if not _is_contiguous_float32(grad):
            message = f"AdamW's kernel requires contiguous float32 gradients, got {_describe(grad)}"
            raise UsageError(message, code="optim.kernel.gradient", gradient=_describe(grad))
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
        self._check_groups()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group["fused"], group["foreach"] = True, None  # the state dict may come from another implementation
            for parameter in group["params"]:
                entries = self.state.get(parameter, {})
                for name, value in entries.items():
                    entries[name] = value.to(parameter.device, torch.float32).contiguous()
        self._check_groups()

    def _check_groups(self) -> None:
        groups = self.param_groups
        for name in ("amsgrad", "maximize", "capturable", "differentiable"):
            if any(group[name] for group in groups):
                raise _unsupported_option(f"{name}=True")
        parameters = [parameter for group in groups for parameter in group["params"]]
        reasons = [reason for parameter in parameters if (reason := unsupported(parameter))]
        devices = sorted({str(parameter.device) for parameter in parameters})
        if not reasons and len(devices) > 1:
            reasons = [f"parameters must be on one device, got {', '.join(devices)}"]
        if reasons:
            message = f"AdamW's kernel does not support these parameters: {reasons[0]}; use torch.optim.AdamW"
            raise UsageError(message, code="optim.kernel.parameter", reason=reasons[0])


def unsupported(parameter: Tensor) -> str | None:
    """Return why the kernel does not support this parameter; None if it does."""
    if type(parameter) not in (Tensor, nn.Parameter):
        return f"a {type(parameter).__name__} is not a plain tensor"
    if parameter.device.type not in ("cuda", "cpu"):
        return f"Triton runs on NVIDIA GPUs, and interpreted on CPUs, not on {parameter.device}"
    if not _is_contiguous_float32(parameter):
        return f"expected contiguous float32, got {_describe(parameter)}"
    return None


def _is_contiguous_float32(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.layout is torch.strided and x.is_contiguous()


def _unsupported_option(option: str) -> UsageError:
    message = f"AdamW's fused kernel does not support {option}; use torch.optim.AdamW"
    return UsageError(message, code="optim.kernel.option", option=option)


def _describe(tensor: Tensor) -> str:
    strides = f", strides {tuple(tensor.stride())}" if tensor.layout is torch.strided else f", {tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape)}{strides}"


# --- launches ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _layout(sizes: tuple[int, ...], counts: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return sizes_N, group_N (the group of each parameter) and blocks_B2 (parameter, block within it) on the device.

    sizes: elements per parameter; counts: parameters per group.
    """
    sizes_N = torch.tensor(sizes)
    blocks_N = (sizes_N + block - 1) // block
    parameter_B = torch.repeat_interleave(blocks_N)
    first_B = (blocks_N.cumsum(0) - blocks_N)[parameter_B]
    blocks_B2 = torch.stack([parameter_B, torch.arange(len(parameter_B)) - first_B], 1).int()
    group_N = torch.repeat_interleave(torch.tensor(counts)).int()
    return sizes_N.to(device), group_N.to(device), blocks_B2.to(device)


def _upload(values: list, kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to the device without blocking the host; the pinned copy stays alive until it has been read."""
    host = torch.frombuffer(array(kind, values), dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _step(addresses: list[int], settings: list[float], layout: tuple[Tensor, ...], scaling: tuple, device) -> None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        message = "AdamW's kernel cannot be captured in a CUDA graph: a replay would read this step's addresses"
        raise UsageError(message, code="optim.kernel.capture")
    sizes_N, group_N, blocks_B2 = layout
    N, B = len(sizes_N), len(blocks_B2)
    table_N5 = _upload(addresses, "q", torch.int64, device)
    settings_G5 = _upload(settings, "d", torch.float64, device)
    scalars_N8 = torch.empty(N, 8, device=device)
    triton_call(
        table_N5, settings_G5, group_N, scalars_N8, *scaling, N,
        kernel=_prepare_kernel, grid=(cdiv(N, _PARAMETERS_PER_PROGRAM),), BLOCK=_PARAMETERS_PER_PROGRAM, num_warps=1,
    )  # fmt: skip
    if B:
        triton_call(table_N5, scalars_N8, sizes_N, blocks_B2, kernel=_step_kernel, grid=(B,), BLOCK=BLOCK, num_warps=4)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _prepare_kernel(
    table_N5, settings_G5, group_N, scalars_N8, grad_scale, found_inf, norm, limit, N, BLOCK: tl.constexpr
):  # fmt: skip
    """Increment each parameter's step count and store its scalars for _step_kernel.

    If a gradient overflowed (found_inf), set gradient addresses to 0, which _step_kernel skips. Bias corrections are
    differences of nearly equal numbers, so they are computed in float64.
    """
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = n < N
    factor = 1.0
    if grad_scale is not None:
        factor = tl.div_rn(1.0, tl.load(grad_scale))
    if norm is not None:
        coefficient = tl.div_rn(limit, tl.load(norm) + 1e-6)
        factor *= tl.where(coefficient > 1.0, 1.0, coefficient)  # propagates NaN; tl.minimum would not
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
    """Update one block of one parameter."""
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
        if aligned & (left >= BLOCK):  # 16-byte accesses; views into DDP's buckets may be unaligned
            _update(param, grad, exp_avg, exp_avg_sq, scalars, start, None, BLOCK)
        else:
            _update(param, grad, exp_avg, exp_avg_sq, scalars, start, left, BLOCK)


@triton.jit
def _elements(address, start, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Return pointers to BLOCK float32 elements from `start`."""
    pointer = address.to(tl.pointer_type(tl.float32)) + start
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + tl.arange(0, BLOCK)


@triton.jit
def _update(param, grad, exp_avg, exp_avg_sq, scalars, start, left, BLOCK: tl.constexpr):
    """Update the block of a parameter that begins at `start`; left: its size, None for a full block at aligned
    addresses.
    """
    is_full: tl.constexpr = left is None
    keep = None if is_full else tl.arange(0, BLOCK) < left
    param, grad = _elements(param, start, BLOCK, is_full), _elements(grad, start, BLOCK, is_full)
    exp_avg, exp_avg_sq = _elements(exp_avg, start, BLOCK, is_full), _elements(exp_avg_sq, start, BLOCK, is_full)
    g = tl.load(grad, mask=keep) * tl.load(scalars + 7)
    m = tl.load(exp_avg, mask=keep)
    v = tl.load(exp_avg_sq, mask=keep)
    p = tl.load(param, mask=keep)
    m = tl.load(scalars + 1) * m + tl.load(scalars + 2) * g
    v = tl.load(scalars + 3) * v + tl.load(scalars + 4) * (g * g)
    moved = tl.div_rn(tl.load(scalars + 5) * m, tl.sqrt_rn(v) + tl.load(scalars + 6))
    # Subtracting the decay avoids the factor 1 - lr·weight_decay, whose rounding error would be the same at each step.
    tl.store(param, p - (tl.load(scalars) * p + moved), mask=keep)
    tl.store(exp_avg, m, mask=keep)
    tl.store(exp_avg_sq, v, mask=keep)
