"""`auto`: for each kind of call the fastest backend that takes it; the log says which, and why not the others."""

import logging
from functools import cache

from vitkernels import attention
from vitkernels.attention.contract import AttentionBackend, Problem

log = logging.getLogger(__name__)


@cache
def _chosen(problem: Problem) -> AttentionBackend:
    name, refused = attention.choose(problem)
    why = "".join(f"; not {other}: {reason}" for other, reason in refused.items())
    log.info("attn=auto chose %s for %s%s", name, problem, why)
    return attention.get(name)


class Auto(AttentionBackend):
    name = "auto"

    def _attend(self, q_BHND, k_BHMD, v_BHMD, **keywords):
        return _chosen(Problem.of(q_BHND, k_BHMD, v_BHMD, **keywords))(q_BHND, k_BHMD, v_BHMD, **keywords)

    def _attend_qkvpacked(self, qkv_BN3HD, **keywords):
        views = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        return _chosen(Problem.of(*views, **keywords)).qkvpacked(qkv_BN3HD, **keywords)


BACKEND = Auto()
