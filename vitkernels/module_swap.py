"""Replace a module in place, sharing its parameters and state-dict keys."""

from collections.abc import Collection
from inspect import get_annotations
from typing import Self, TypeVar

from torch import nn

from vitkernels.errors import UsageError

M = TypeVar("M", bound=nn.Module)


class SwappedModule(nn.Module):
    """First base of a class that replaces instances of its second base.

        class FusedLinear(SwappedModule, nn.Linear):
            backend: str

        layer = FusedLinear.from_module(linear, backend="triton")
        linear = layer.to_original()

    Annotations declare the settings, in the class body or in further bases: `from_module` requires each by name,
    `to_original` drops them.
    """

    @classmethod
    def from_module(cls, module: nn.Module, **settings) -> Self:
        """Return an instance that shares the parameters, buffers, submodules and hooks of `module`.

        `module` may itself be swapped: its settings are dropped first.
        """
        names = _settings_of(cls)
        if settings.keys() != names:
            raise TypeError(f"{cls.__name__} has the settings {', '.join(sorted(names))}; got {list(settings)}")
        swapped = instance_sharing_state(cls, module, without=_settings(module))
        swapped.__dict__.update(settings)
        return swapped

    def to_original(self) -> nn.Module:
        """Return an instance of the replaced class that shares this module's state."""
        return instance_sharing_state(original_class(self), self, without=_settings(self))

    def __prepare_scriptable__(self) -> nn.Module:
        """Raise UsageError "models.torchscript": torch.jit.script cannot compile the functions that call kernels."""
        name = type(self).__name__
        raise UsageError(
            f"TorchScript cannot compile {name}: before torch.jit.script, restore timm's modules with "
            "set_ops(model, {}), and do not quantize; or use torch.export or torch.compile",
            code="models.torchscript",
            module=name,
        )


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a swapped module replaced; for any other module its own class."""
    bases = type(module).__bases__
    return bases[1] if bases[0] is SwappedModule else type(module)


def instance_sharing_state(cls: type[M], module: nn.Module, without: Collection[str] = ()) -> M:
    """Return an instance of `cls` that shares the attributes of `module`, except those in `without`."""
    instance = cls.__new__(cls)
    nn.Module.__init__(instance)
    instance.__dict__.update({name: value for name, value in module.__dict__.items() if name not in without})
    return instance


def _settings(module: nn.Module) -> Collection[str]:
    return _settings_of(type(module)) if type(module).__bases__[0] is SwappedModule else ()


def _settings_of(cls: type) -> set[str]:
    mixins = [base for mixin in cls.__bases__[2:] for base in mixin.__mro__]
    return {name for each in (cls, *mixins) for name in get_annotations(each)}
