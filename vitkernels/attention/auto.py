"""`auto`: dispatch each call to the fastest backend that supports it; log the choice, and why faster ones refused."""

import logging

import torch

from vitkernels.attention.backends import OP, choose, chosen
from vitkernels.attention.contract import AttentionBackend
from vitkernels.attention.problem import Problem
from vitkernels.registry.op import passed_over
from vitkernels.registry.tracing import constant_when_traced

log = logging.getLogger(__name__)


class Auto(AttentionBackend):
    """Dispatch each call to the backend that `vitkernels.attention.choose` selects for it."""

    name = "auto"

    def _runner(self, problem: Problem) -> AttentionBackend:
        if not torch.compiler.is_compiling():
            return chosen(problem)
        # A compiled graph chooses once, at trace time; Dynamo would trace through the cache of `chosen`, and warn.
        name, refused = choose(problem)
        _log_traced(name, passed_over(refused))
        return OP.get(name)


@constant_when_traced  # logging would break the graph
def _log_traced(name: str, why: str) -> None:
    log.info("attention: auto chose %s for a compiled graph%s", name, why)


BACKEND = Auto()
