"""A module put in the place of another, around the same parameters under the same names."""

from typing import Self

from torch import nn


class Adopted(nn.Module):
    """Base of a module class that stands for another one's instance; that one's class is its next base.

    What is annotated in the class itself are settings: `adopt` takes them by name, and `released` drops them.
    """

    @classmethod
    def adopt(cls, module: nn.Module, **settings) -> Self:
        """This class around an existing module's parameters and submodules, which stay the same objects."""
        adopted = cls.__new__(cls)
        nn.Module.__init__(adopted)
        adopted.__dict__.update(module.__dict__, **settings)
        return adopted

    def released(self) -> nn.Module:
        """The module that was adopted, as its own class."""
        original = kind_of(self)
        module = original.__new__(original)
        nn.Module.__init__(module)
        module.__dict__.update({k: v for k, v in self.__dict__.items() if k not in type(self).__annotations__})
        return module


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The module's class, or that of the one it was adopted from."""
    return type(module).__bases__[1] if isinstance(module, Adopted) else type(module)
