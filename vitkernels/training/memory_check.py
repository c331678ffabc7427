"""Refuse a run whose attention cannot fit into the device's memory, before the model is built."""

from vitkernels.errors import UsageError
from vitkernels.models import ModelFacts
from vitkernels.runtime import Runtime

_SCORE_BYTES = 4  # native attention computes its softmax in float32


def check_memory(
    facts: ModelFacts, runtime: Runtime, *, image_size: int, batch_size: int, training: bool, keeps_scores: bool
) -> None:
    """Raise UsageError if q, k, v and the output of attention alone need more memory than the device has.

    Every backend keeps them for the backward pass, of all calls of a batch; without one, they exist for one call at a
    time. All other activations, the weights and the optimizer come on top, so a run that passes may still run out.

    Args:
        facts: of one batch of batch_size images, image_size pixels wide.
        keeps_scores: whether attention also keeps its scores, as native attention does unless it is compiled.
    """
    total = runtime.total_memory_bytes()
    if total is None:
        return
    per_call, tokens = [], 0
    for problem in facts.attention:
        entries = 2 * (problem.q_tokens + problem.kv_tokens) * problem.head_dim * problem.dtype.itemsize
        scores = problem.q_tokens * problem.kv_tokens * _SCORE_BYTES if keeps_scores else 0
        per_call.append(problem.batch * problem.heads * (entries + scores))
        tokens = max(tokens, problem.batch * problem.q_tokens // batch_size)  # windows are batch entries
    calls = zip(per_call, facts.attention_calls, strict=True)
    least = sum(size * count for size, count in calls) if training else max(per_call)
    if least <= total:
        return
    what = "q, k, v, scores and output" if keeps_scores else "q, k, v and output"
    fitting = total * batch_size // least
    batches = f"lower data.batch_size to {fitting} or less" if fitting else "even data.batch_size=1 is too much"
    raise UsageError(
        f"images of {image_size} px are {tokens} tokens each: {what} of attention take at least {_gib(least)} for a "
        f"batch of {batch_size}, and {runtime.device_name} has {_gib(total)}. Lower model.img_size, or "
        f"use larger patches or a narrower model; {batches}",
        code="run.memory",
        image_size=image_size,
        tokens=tokens,
        least_bytes=least,
        total_bytes=total,
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
