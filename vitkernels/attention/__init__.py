"""Attention backends behind one contract: `attention.get("sdpa")(q, k, v)`."""

from vitkernels.attention.backends import (
    broken,
    candidates,
    choose,
    choose_for_all,
    configured,
    get,
    names,
    register,
    unregister,
    unsupported,
)
from vitkernels.attention.contract import AttentionBackend
from vitkernels.attention.problem import Problem

__all__ = [
    "AttentionBackend",
    "Problem",
    "broken",
    "candidates",
    "choose",
    "choose_for_all",
    "configured",
    "get",
    "names",
    "register",
    "unregister",
    "unsupported",
]
