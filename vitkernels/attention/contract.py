"""The contract of attention backends: SDPA's semantics on two layouts, and a reason for each refusal.

Shape suffixes: B batch, H heads, N query tokens, M key and value tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import math

import torch
from torch import Tensor

from vitkernels.attention.problem import Problem, check_tensors, scale_of
from vitkernels.attention.sdpa_names import bias_and_mask, repeated_heads
from vitkernels.autocast import cast
from vitkernels.bridge.operator import BoundedCache, runs_eagerly
from vitkernels.errors import UsageError
from vitkernels.registry.op import unsupported_error

_dispatched_calls = BoundedCache()  # a call without bias, mask, segment_ids and rope -> the backend that runs it


def forget_dispatch() -> None:
    """Clear the dispatch cache, because the choices of `auto` have changed."""
    _dispatched_calls.clear()


class AttentionBackend:
    """Compute softmax(scale * q kᵀ + bias) v, with SDPA's semantics, on the two layouts that models use.

    A subclass sets `name` and defines `run`; `refusal` if it does not support every problem; `unavailable` if it cannot
    run on every machine; and `run_qkvpacked` if its kernel reads the projection's own layout. Callers use the instance
    itself, `qkvpacked` and `unsupported`, which check the arguments and apply autocast.

    Keywords of both entry points:
        bias: floating, broadcastable to (B, H, N, M), added after scaling; differentiable. -inf masks.
        mask: boolean, broadcastable to (B, H, N, M); True keeps.
        segment_ids: integers (B, N) that fit in 32 bits; a token attends to the tokens with the same id.
        is_causal: query i sees keys 0..i (aligned at the top left, as in SDPA).
        scale: a number without a gradient; defaults to D ** -0.5.
        dropout_p: probability of dropping an attention weight; the caller passes 0 in evaluation.
        rope: rotary position embeddings of the last tokens of q and k, as timm makes them: their D sines and then their
            D cosines, floating, broadcastable to (B, H, tokens, 2 * D). With fewer rows than tokens, the first tokens
            (class and register tokens) are not rotated. q and k are rotated in float32 and rounded to their dtype.
        rope_half: whether column i rotates with column i + D / 2; by default columns 2 i and 2 i + 1 rotate together.
        attn_mask: SDPA's name of bias (floating) and mask (boolean).
        enable_gqa: as in SDPA, k and v have fewer heads, each shared by consecutive heads of q. They are repeated. Not
            for `qkvpacked`.
    They can be combined freely. The output and gradients of a query without keys are zero. Under torch.autocast, q, k
    and v are cast to its dtype, as in SDPA.

    An unsupported call raises UsageError (a ValueError) with the reason that `unsupported` returns.
    """

    name: str
    is_foreign = False  # whether another package defines the class; the results of its kernel are then checked

    def __init_subclass__(cls, **keywords) -> None:
        super().__init_subclass__(**keywords)
        cls.is_foreign = not cls.__module__.startswith("vitkernels.")

    def __deepcopy__(self, memo) -> "AttentionBackend":
        return self  # a backend is immutable; a copied model runs the same one

    # ------------------------------------------------------------------ for subclasses to define
    def configured(self, **options) -> "AttentionBackend":
        """Return this backend with the options from its YAML in conf/attn/; raise UsageError for an unknown option."""
        if options:
            message = f"attention backend {self.name!r} has no options, got {', '.join(options)}"
            raise UsageError(message, code="attention.options", backend=self.name, options=tuple(options))
        return self

    def unavailable(self) -> str | None:
        """Return why this backend cannot run on this machine and what to change; None if it can."""
        return None

    def limitation(self) -> str | None:
        """Return what makes this backend slower than it could be on this machine, for the doctor; None if nothing."""
        return None

    def refusal(self, problem: Problem) -> str | None:
        """Return why this backend does not support the problem on a machine where it can run; None if it does."""
        return None

    def is_slower(self, problem: Problem) -> bool:
        """Return whether later backends in the order of `auto` are faster; `auto` then tries this one last."""
        return False

    # Types of device on which `run` and `run_qkvpacked` also take rope and rope_half. Elsewhere q and k come rotated.
    rotates_on: tuple[str, ...] = ()

    def run(self, q_BHND, k_BHMD, v_BHMD, *, bias, mask, segment_ids, is_causal, scale, dropout_p) -> Tensor:
        """Return (B, H, N, D) in q's dtype. The arguments are checked; every keyword is passed, scale as a float.

        With is_causal there are at most as many keys as queries, except if there are no queries.
        """
        raise NotImplementedError(f"{type(self).__module__}.{type(self).__qualname__} defines no run")

    def run_qkvpacked(self, qkv_BN3HD: Tensor, **keywords) -> Tensor:
        """Return (B, N, H * D); by default, call `run` on views of qkv."""
        q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        return self._run_checked(q_BHND, k_BHND, v_BHND, **keywords).transpose(1, 2).flatten(2)

    def _run_checked(self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, **keywords) -> Tensor:
        """Call `run`, and check what another package's returns: a mistake would otherwise surface elsewhere."""
        out_BHND = self.run(q_BHND, k_BHMD, v_BHMD, **keywords)
        if self.is_foreign:
            _check_result(self, "run", out_BHND, q_BHND.shape, q_BHND.dtype)
        return out_BHND

    # ------------------------------------------------------------------ for callers
    def unsupported(self, problem: Problem | Tensor, *args, **keywords) -> str | None:
        """Return why this backend refuses a `Problem`, or a call with these tensors; None if it supports it."""
        if not isinstance(problem, Problem):
            problem = Problem.of(problem, *args, **keywords)
        return self.unavailable() or self.refusal(problem)

    def __call__(
        self,
        q_BHND: Tensor,
        k_BHMD: Tensor,
        v_BHMD: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        rope: Tensor | None = None,
        rope_half: bool = False,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Map q (B, H, N, D), k and v (B, H, M, D) to (B, H, N, D) in q's dtype, or in autocast's if enabled."""
        try:
            q_BHND, k_BHMD, v_BHMD = tensors = cast(q_BHND, k_BHMD, v_BHMD)
        except AttributeError:
            check_tensors(q=q_BHND, k=k_BHMD, v=v_BHMD)
            raise
        if attn_mask is not None:
            bias, mask = bias_and_mask(attn_mask, bias, mask)
        if enable_gqa:
            k_BHMD, v_BHMD = repeated_heads(q_BHND, k_BHMD, v_BHMD)
            tensors = q_BHND, k_BHMD, v_BHMD
        number = None if scale is None else scale_of(scale)
        runner = self._dispatch(tensors, bias, mask, segment_ids, is_causal, dropout_p, rope)
        if is_causal:
            k_BHMD, v_BHMD, bias, mask = _seen_by_last_query(q_BHND.shape[2], k_BHMD, v_BHMD, bias, mask)
        rotation = {}
        if rope is not None and runner._rotates(rope):
            rotation = {"rope": rope, "rope_half": rope_half}
        elif rope is not None:
            q_BHND, k_BHMD = rotated(q_BHND, rope, rope_half), rotated(k_BHMD, rope, rope_half)
        return runner._run_checked(
            q_BHND,
            k_BHMD,
            v_BHMD,
            bias=bias,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=is_causal,
            scale=q_BHND.shape[-1] ** -0.5 if number is None else number,
            dropout_p=dropout_p,
            **rotation,
        )

    def qkvpacked(
        self,
        qkv_BN3HD: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        dropout_p: float = 0.0,
        rope: Tensor | None = None,
        rope_half: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Map the projection's packed qkv (B, N, 3, H, D) to (B, N, H * D), ready for the output projection."""
        if not isinstance(qkv_BN3HD, Tensor) or qkv_BN3HD.ndim != 5 or qkv_BN3HD.shape[2] != 3:
            check_tensors(qkv=qkv_BN3HD)
            shape = tuple(qkv_BN3HD.shape)
            message = f"qkv must be (batch, tokens, 3, heads, head dim), got {shape}"
            raise UsageError(message, code="attention.shape", qkv=shape)
        (qkv_BN3HD,) = tensors = cast(qkv_BN3HD)
        if attn_mask is not None:
            bias, mask = bias_and_mask(attn_mask, bias, mask)
        number = None if scale is None else scale_of(scale)
        runner = self._dispatch(tensors, bias, mask, segment_ids, is_causal, dropout_p, rope)
        keywords = {
            "bias": bias,
            "mask": mask,
            "segment_ids": segment_ids,
            "is_causal": is_causal,
            "scale": qkv_BN3HD.shape[-1] ** -0.5 if number is None else number,
            "dropout_p": dropout_p,
        }
        if rope is None:
            out_BNE = runner.run_qkvpacked(qkv_BN3HD, **keywords)
        elif runner._rotates(rope):
            out_BNE = runner.run_qkvpacked(qkv_BN3HD, rope=rope, rope_half=rope_half, **keywords)
        else:
            q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
            q_BHND, k_BHND = rotated(q_BHND, rope, rope_half), rotated(k_BHND, rope, rope_half)
            return runner._run_checked(q_BHND, k_BHND, v_BHND, **keywords).transpose(1, 2).flatten(2)
        if runner.is_foreign:
            B, N, _, H, D = qkv_BN3HD.shape
            _check_result(runner, "run_qkvpacked", out_BNE, (B, N, H * D), qkv_BN3HD.dtype)
        return out_BNE

    def _rotates(self, rope: Tensor) -> bool:
        """Return whether the backend itself rotates q and k. No backend computes the gradient of rope."""
        return rope.device.type in self.rotates_on and not (rope.requires_grad and torch.is_grad_enabled())

    # ------------------------------------------------------------------ dispatch
    def _dispatch(self, tensors, bias, mask, segment_ids, is_causal, dropout_p, rope) -> "AttentionBackend":
        """Return the backend that runs a call, from a cache: checking a call takes longer than a short kernel.

        tensors: q, k and v, or packed qkv alone, after the cast.
        """

        def examined() -> AttentionBackend:
            q, k, v = tensors if len(tensors) == 3 else tensors[0].permute(2, 0, 3, 1, 4).unbind(0)
            keywords = {"dropout_p": dropout_p, "rope": rope}
            return self._runner(Problem.of(q, k, v, bias, mask, segment_ids, is_causal, **keywords))

        if any(x is not None for x in (bias, mask, segment_ids, rope)) or not runs_eagerly(tensors):
            return examined()
        call = self, is_causal, type(is_causal), dropout_p, *[(x.shape, x.dtype, x.device) for x in tensors]
        runner = _dispatched_calls.get(call)
        if runner is None:
            runner = _dispatched_calls[call] = examined()
        return runner

    def _runner(self, problem: Problem) -> "AttentionBackend":
        """Return the backend that runs the problem: this one, except for `auto`. Raise UsageError if refused."""
        reason = self.unsupported(problem)
        if reason is not None:
            raise unsupported_error("attention", self.name, reason)
        return self


def _check_result(
    backend: AttentionBackend, function: str, out: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raise UsageError "attention.result" if a backend did not return a tensor of this shape and dtype."""
    if isinstance(out, Tensor) and tuple(out.shape) == tuple(shape) and out.dtype == dtype:
        return
    got = f"{tuple(out.shape)} in {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
    message = (
        f"attention backend {backend.name!r} ({type(backend).__module__}) must return {tuple(shape)} in {dtype} from "
        f"{function}, got {got}"
    )
    raise UsageError(message, code="attention.result", backend=backend.name)


def _seen_by_last_query(N: int, k_BHMD: Tensor, v_BHMD: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple:
    """Return the keys, values, bias and mask that the last of N causal queries sees: keys 0..N-1.

    No query sees the others, so that even NaN in them must not matter.
    """
    if not 0 < N < k_BHMD.shape[2]:
        return k_BHMD, v_BHMD, bias, mask
    extras = (x if x is None or x.shape[-1] == 1 else x[..., :N] for x in (bias, mask))
    return k_BHMD[:, :, :N], v_BHMD[:, :, :N], *extras


# Kernels may divide a bias by these scales: the quotient, and what q k can be, is far from infinite.
_SCALES = 2.0**-24, 2.0**24


def folded_scale(scale: float) -> tuple[float, float]:
    """Return (factor, rest), whose product is `scale`; rest is from 2^-24 to 2^24.

    factor is 1 if scale itself is in that range, otherwise 0, -1 or a power of two, by which a caller multiplies q
    without rounding.
    """
    if scale == 0:
        return 0.0, 1.0
    if _SCALES[0] <= abs(scale) <= _SCALES[1]:
        return math.copysign(1.0, scale), abs(scale)
    rest, exponent = math.frexp(abs(scale))
    return math.copysign(2.0**exponent, scale), rest


def rotated(x_BHND: Tensor, rope: Tensor, rope_half: bool) -> Tensor:
    """Return q or k with rotary embeddings (Su et al. 2021, arXiv 2104.09864) applied to its last tokens.

    rope and rope_half: see `AttentionBackend`.
    """
    tokens = rope.shape[-2]
    first, last = x_BHND.split([x_BHND.shape[2] - tokens, tokens], 2)
    sin, cos = rope.to(torch.promote_types(rope.dtype, torch.float32)).chunk(2, -1)
    if rope_half:
        low, high = last.chunk(2, -1)
        turned = torch.cat([-high, low], -1)
    else:
        turned = torch.stack([-last[..., 1::2], last[..., ::2]], -1).flatten(-2)
    return torch.cat([first, (last * cos + turned * sin).to(x_BHND.dtype)], 2)


def keep_mask(
    q_BHND: Tensor, k_BHMD: Tensor, mask: Tensor | None, segment_ids: Tensor | None, is_causal: bool
) -> Tensor | None:
    """Return mask, segments and causality as one boolean, broadcastable to (B, H, N, M); None if every key is kept."""
    keep = mask
    if segment_ids is not None:
        same_B1NN = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        keep = same_B1NN if keep is None else keep & same_B1NN
    if is_causal:
        N, M = q_BHND.shape[2], k_BHMD.shape[2]
        lower_NM = torch.ones(N, M, dtype=torch.bool, device=q_BHND.device).tril()
        keep = lower_NM if keep is None else keep & lower_NM
    return keep
