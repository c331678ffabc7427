"""Replace a module in place, sharing its parameters and state-dict keys."""

from collections.abc import Collection
from typing import Self, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


class SwappedModule(nn.Module):
    """First base of a class that replaces instances of its second base.

        class FusedLinear(SwappedModule, nn.Linear):
            backend: str

        layer = FusedLinear.from_module(linear, backend="triton")
        linear = layer.to_original()

    Annotations in the class body declare its settings: `from_module` requires each by name, `to_original` drops them.
    """

    @classmethod
    def from_module(cls, module: nn.Module, **settings) -> Self:
        """Return an instance that shares the parameters, buffers, submodules and hooks of `module`.

        `module` may itself be swapped: its settings are dropped first.
        """
        if settings.keys() != cls.__annotations__.keys():
            raise TypeError(f"{cls.__name__} has the settings {', '.join(cls.__annotations__)}; got {list(settings)}")
        swapped = instance_sharing_state(cls, module, without=_settings(module))
        swapped.__dict__.update(settings)
        return swapped

    def to_original(self) -> nn.Module:
        """Return an instance of the replaced class that shares this module's state."""
        return instance_sharing_state(original_class(self), self, without=_settings(self))


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
    return type(module).__annotations__ if type(module).__bases__[0] is SwappedModule else ()
