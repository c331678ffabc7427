"""Refuse to replace modules that a wrapper or a compiler already holds, because it would keep using the old ones."""

from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from vitkernels.errors import UsageError
from vitkernels.models.adapters import AttentionPlan

_WRAPPERS = {
    FSDPModule: "fully_shard",
    FullyShardedDataParallel: "FullyShardedDataParallel",
    DistributedDataParallel: "DistributedDataParallel",
    DataParallel: "DataParallel",
    OptimizedModule: "torch.compile",
}


def check_unwrapped(model: nn.Module) -> None:
    """Raise UsageError "models.wrapped" if the model or one of its modules is wrapped, or one of these is compiled.

    A model that was compiled as a whole is accepted, because torch.compile then compiles it again.
    """
    for path, module in model.named_modules():
        if (wrapper := _wrapper(module)) is not None and (path or wrapper != "torch.compile"):
            raise _error("set_ops", wrapper, path)


def check_attention_unwrapped(model: nn.Module, plan: AttentionPlan) -> None:
    """Raise UsageError "models.wrapped" if an attention module itself is sharded or compiled; its parents may be."""
    for path in (*plan.replaceable, *plan.unsupported):
        for each in (path, path.removesuffix("._orig_mod")):  # the compiled module and its original
            if (wrapper := _wrapper(model.get_submodule(each))) is not None:
                raise _error("set_attention", wrapper, each)


def _wrapper(module: nn.Module) -> str | None:
    """Return what wrapped or compiled this module, None for a plain one."""
    if module._compiled_call_impl is not None:  # by module.compile()
        return "torch.compile"
    return next((name for kind, name in _WRAPPERS.items() if isinstance(module, kind)), None)


def _error(caller: str, wrapper: str, path: str) -> UsageError:
    what = f"the model's {path}" if path else "the model"
    message = f"{wrapper} was already applied to {what}: call {caller} or accelerate before {wrapper}"
    return UsageError(message, code="models.wrapped", caller=caller, wrapper=wrapper, path=path)
