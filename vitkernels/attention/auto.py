"""`auto`: for each kind of call the fastest backend that takes it; the log says which, and why not the others."""

import logging
from functools import cache

import torch

from vitkernels import attention
from vitkernels.attention.contract import AttentionBackend, Problem

log = logging.getLogger(__name__)


def _chosen(problem: Problem) -> AttentionBackend:
    if not torch.compiler.is_compiling():
        return _chosen_before(problem)
    # A compiled graph chooses once, while it is traced; Dynamo would look through the cache, and warn of it.
    _import(problem.device_type)
    return _choose(problem, "a compiled graph")


@cache
def _chosen_before(problem: Problem) -> AttentionBackend:
    return _choose(problem, str(problem))


def _choose(problem: Problem, called: str) -> AttentionBackend:
    name, refused = attention.choose(problem)
    why = "".join([f"; not {other}: {reason}" for other, reason in refused.items()])
    _say(name, called, why)
    return attention.get(name)


# Neither an import nor a log can be traced: each would break the graph.
@torch.compiler.assume_constant_result
def _import(device_type: str) -> None:
    for name in attention.candidates(device_type):
        attention.broken(name)


@torch.compiler.assume_constant_result
def _say(name: str, called: str, why: str) -> None:
    log.info("attn=auto chose %s for %s%s", name, called, why)


class Auto(AttentionBackend):
    name = "auto"

    def _runner(self, problem: Problem) -> AttentionBackend:
        return _chosen(problem)


BACKEND = Auto()
