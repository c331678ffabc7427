"""The contract of attention backends: SDPA's semantics on two layouts, and a reason for each refusal.

Shape suffixes: B batch, H heads, N query tokens, M key and value tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkernels.attention.sdpa_names import bias_and_mask, repeated_heads
from vitkernels.autocast import cast, dtype_of
from vitkernels.bridge.operator import BoundedCache, runs_eagerly
from vitkernels.errors import UsageError
from vitkernels.registry.op import unsupported_error


@dataclass(frozen=True)
class Problem:
    """Describe one attention call without its data: everything that decides whether a backend supports it."""

    batch: int
    heads: int
    q_tokens: int
    kv_tokens: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    bias_shape: tuple[int, ...] | None = None
    has_mask: bool = False
    has_segment_ids: bool = False
    is_causal: bool = False
    dropout_p: float = 0.0
    has_rope: bool = False
    mask_shape: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        q_BHND: Tensor,
        k_BHMD: Tensor,
        v_BHMD: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,  # accepted like a call's other arguments, but unused: backends support any scale
        dropout_p: float = 0.0,
        rope: Tensor | None = None,
        rope_half: bool = False,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> "Problem":
        """Return the problem of a call with these arguments; raise UsageError if they are inconsistent."""
        if attn_mask is not None:
            bias, mask = bias_and_mask(attn_mask, bias, mask)
        if enable_gqa:
            k_BHMD, v_BHMD = repeated_heads(q_BHND, k_BHMD, v_BHMD)
        _check(q_BHND, k_BHMD, v_BHMD, bias, mask, segment_ids, is_causal, dropout_p, rope)
        B, H, N, D = q_BHND.shape
        return cls(
            batch=B,
            heads=H,
            q_tokens=N,
            kv_tokens=k_BHMD.shape[2],
            head_dim=D,
            dtype=dtype_of(q_BHND),
            device_type=q_BHND.device.type,
            bias_shape=None if bias is None else tuple(bias.shape),
            has_mask=mask is not None,
            has_segment_ids=segment_ids is not None,
            is_causal=is_causal,
            dropout_p=dropout_p,
            has_rope=rope is not None,
            mask_shape=None if mask is None else tuple(mask.shape),
        )


def _check(q, k, v, bias, mask, segment_ids, is_causal, dropout_p, rope) -> None:
    extras = {"bias": bias, "mask": mask, "segment_ids": segment_ids, "rope": rope}
    _check_tensors(q=q, k=k, v=v, **extras)
    scores = _check_qkv(q, k, v)
    for name, x in {"k": k, "v": v, **extras}.items():
        if x is not None and x.device != q.device:
            message = f"{name} is on {x.device}, q on {q.device}; move them to one device"
            raise UsageError(message, code="attention.device", name=name)
    if bias is not None:
        if not bias.dtype.is_floating_point:
            message = f"bias must be floating, got {bias.dtype}; pass a boolean keep-mask as mask="
            raise UsageError(message, code="attention.dtype", name="bias")
        _check_broadcast("bias", bias, scores)
    if mask is not None:
        if mask.dtype != torch.bool:
            message = f"mask must be boolean (True keeps), got {mask.dtype}; pass an additive mask as bias="
            raise UsageError(message, code="attention.dtype", name="mask")
        _check_broadcast("mask", mask, scores)
    if segment_ids is not None:
        _check_segment_ids(segment_ids, scores)
    if rope is not None:
        _check_rope(rope, scores, q.shape[3])
    if type(is_causal) not in (bool, torch.SymBool):  # kernels disagree on the truth of other values
        raise UsageError(f"is_causal must be True or False, got {is_causal!r}", code="attention.is_causal")
    if not isinstance(dropout_p, (int, float, torch.SymFloat)) or not 0.0 <= dropout_p < 1.0:
        message = f"dropout_p must be a number of at least 0 and less than 1, got {dropout_p!r}"
        raise UsageError(message, code="attention.dropout_p", dropout_p=dropout_p)


def _check_tensors(**given) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v", "qkv")):
            hint = "convert it with torch.as_tensor"
            if x is None:
                hint = "pass a tensor"
            elif isinstance(x, (bool, int, float)):
                hint = "pass dropout_p=, is_causal= and scale= by name: their order differs from SDPA's"
            message = f"{name} must be a torch tensor, got {type(x).__name__}; {hint}"
            raise UsageError(message, code="attention.type", name=name)


def _check_qkv(q, k, v) -> tuple[int, int, int, int]:
    """Return the shape of the scores, (B, H, N, M)."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise _shape_error("q, k and v must have 4 dimensions (batch, heads, tokens, head dim)", q, k, v)
    B, H, N, D = q.shape
    M = k.shape[2]
    if k.shape != (B, H, M, D) or v.shape != (B, H, M, D):
        expected = "k and v must have q's batch size, heads and head dim, and the same number of tokens as each other"
        raise _shape_error(expected, q, k, v)
    if D == 0:
        raise _shape_error("the head dim must be at least 1", q, k, v)
    is_floating = q.dtype.is_floating_point and q.dtype.itemsize > 1  # 8-bit floats are storage formats
    if not dtype_of(q) == dtype_of(k) == dtype_of(v) or not is_floating:
        message = f"q, k and v must share one floating dtype of 16 bits or more; got {q.dtype}, {k.dtype} and {v.dtype}"
        raise UsageError(message, code="attention.dtype", name="q")
    return B, H, N, M


def _shape_error(expected: str, q: Tensor, k: Tensor, v: Tensor) -> UsageError:
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)}
    got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return UsageError(f"{expected}; got {got}", code="attention.shape", **shapes)


def _check_segment_ids(segment_ids: Tensor, scores: tuple[int, ...]) -> None:
    B, _, N, M = scores
    is_integer = not (segment_ids.dtype.is_floating_point or segment_ids.dtype.is_complex)
    if not is_integer or segment_ids.shape != (B, N) or N != M:
        raise UsageError(
            "segment_ids must be integers of shape (batch, tokens), in self-attention; "
            f"got {segment_ids.dtype} {tuple(segment_ids.shape)} for {N} queries and {M} keys of batch size {B}",
            code="attention.segment_ids",
            shape=tuple(segment_ids.shape),
            dtype=segment_ids.dtype,
        )


def _check_rope(rope: Tensor, scores: tuple[int, ...], head_dim: int) -> None:
    B, H, N, M = scores
    fits = 2 <= rope.ndim <= 4 and rope.shape[-1] == 2 * head_dim and rope.shape[-2] <= N == M and head_dim % 2 == 0
    leading = (1,) * (4 - rope.ndim) + tuple(rope.shape[:-2])
    if not fits or not rope.dtype.is_floating_point or leading[0] not in (1, B) or leading[1] not in (1, H):
        raise UsageError(
            "rope must be floating, the sines and then the cosines of the last tokens, in self-attention with an even "
            f"head dim: (batch or 1, heads or 1, at most {N}, 2 * {head_dim}); "
            f"got {rope.dtype} {tuple(rope.shape)} for {N} queries and {M} keys",
            code="attention.rope",
            shape=tuple(rope.shape),
            dtype=rope.dtype,
        )


def _check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    first = len(shape) - x.ndim
    fits = 1 <= x.ndim <= len(shape) and all(x.shape[i] in (1, shape[first + i]) for i in range(x.ndim))
    if not fits:
        message = f"{name} must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(x.shape)}"
        raise UsageError(message, code="attention.broadcast", name=name, shape=tuple(x.shape))


def _number(scale) -> float:
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        message = "scale must be a number without a gradient: pass scale=1.0, and q * scale as q"
        raise UsageError(message, code="attention.scale_gradient")
    try:
        return float(scale)
    except (TypeError, ValueError, RuntimeError):
        got = f"a tensor of shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        message = f"scale must be one number, got {got}; to scale per head or row, pass scale=1.0, and q * scale as q"
        raise UsageError(message, code="attention.scale") from None


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
    _is_own = True  # whether this package has the subclass, and the conformance suite checks its results

    def __init_subclass__(cls, **keywords) -> None:
        super().__init_subclass__(**keywords)
        cls._is_own = cls.__module__.startswith("vitkernels.")

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
        return self._ran(q_BHND, k_BHND, v_BHND, **keywords).transpose(1, 2).flatten(2)

    def _ran(self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, **keywords) -> Tensor:
        """Return what `run` does, which is checked if another package has it: else a mistake would fail elsewhere."""
        out_BHND = self.run(q_BHND, k_BHMD, v_BHMD, **keywords)
        if not self._is_own:
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
            _check_tensors(q=q_BHND, k=k_BHMD, v=v_BHMD)
            raise
        if attn_mask is not None:
            bias, mask = bias_and_mask(attn_mask, bias, mask)
        if enable_gqa:
            k_BHMD, v_BHMD = repeated_heads(q_BHND, k_BHMD, v_BHMD)
            tensors = q_BHND, k_BHMD, v_BHMD
        number = None if scale is None else _number(scale)
        runner = self._dispatch(tensors, bias, mask, segment_ids, is_causal, dropout_p, rope)
        if is_causal:
            k_BHMD, v_BHMD, bias, mask = _seen_by_last_query(q_BHND.shape[2], k_BHMD, v_BHMD, bias, mask)
        rotation = {}
        if rope is not None and runner._rotates(rope):
            rotation = {"rope": rope, "rope_half": rope_half}
        elif rope is not None:
            q_BHND, k_BHMD = rotated(q_BHND, rope, rope_half), rotated(k_BHMD, rope, rope_half)
        return runner._ran(
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
            _check_tensors(qkv=qkv_BN3HD)
            shape = tuple(qkv_BN3HD.shape)
            message = f"qkv must be (batch, tokens, 3, heads, head dim), got {shape}"
            raise UsageError(message, code="attention.shape", qkv=shape)
        (qkv_BN3HD,) = tensors = cast(qkv_BN3HD)
        if attn_mask is not None:
            bias, mask = bias_and_mask(attn_mask, bias, mask)
        number = None if scale is None else _number(scale)
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
            return runner._ran(q_BHND, k_BHND, v_BHND, **keywords).transpose(1, 2).flatten(2)
        if not runner._is_own:
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


def _check_result(backend: AttentionBackend, function: str, out, shape: tuple[int, ...], dtype: torch.dtype) -> None:
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
