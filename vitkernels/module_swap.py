"""A module put in the place of another, around the same parameters under the same names."""

from typing import Self

from torch import nn


class Adopted(nn.Module):
    """First base of a module class that stands for another one's instance; that one's class is the second.

    What is annotated in the class itself are settings: `adopt` takes all of them, by name, and `released` drops them.
    """

    @classmethod
    def adopt(cls, module: nn.Module, **settings) -> Self:
        """This class around an existing module's parameters and submodules, which stay the same objects."""
        if settings.keys() != cls.__annotations__.keys():
            raise TypeError(f"{cls.__name__} has the settings {', '.join(cls.__annotations__)}; got {list(settings)}")
        adopted = cls.__new__(cls)
        nn.Module.__init__(adopted)
        adopted.__dict__.update(_without_settings(module), **settings)
        return adopted

    def released(self) -> nn.Module:
        """The module that was adopted, as its own class."""
        original = kind_of(self)
        module = original.__new__(original)
        nn.Module.__init__(module)
        module.__dict__.update(_without_settings(self))
        return module


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The module's class, or that of the one it was adopted from."""
    bases = type(module).__bases__
    return bases[1] if bases[0] is Adopted else type(module)


def _without_settings(module: nn.Module) -> dict:
    settings = type(module).__annotations__ if type(module).__bases__[0] is Adopted else {}
    return {name: value for name, value in module.__dict__.items() if name not in settings}
