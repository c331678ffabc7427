"""What every attention backend promises: SDPA's semantics on two layouts, and a reason when it cannot.

Shape suffixes: B batch, H heads, N query tokens, M key and value tokens, D head dim, E = H * D, 3 = q, k, v.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitkernels.autocast import cast, dtype_of
from vitkernels.bridge.operator import BoundedCache, runs_eagerly
from vitkernels.errors import UsageError


@dataclass(frozen=True)
class Problem:
    """One attention call without its data: all that decides whether a backend can take it."""

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
        scale: float | None = None,  # any scale is every backend's duty; here so that a call's arguments fit
        dropout_p: float = 0.0,
    ) -> "Problem":
        """The problem that a call with these arguments poses; raises ValueError when they do not fit together."""
        _check(q_BHND, k_BHMD, v_BHMD, bias, mask, segment_ids, is_causal, dropout_p)
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
        )


def _check(q, k, v, bias, mask, segment_ids, is_causal, dropout_p) -> None:
    _check_tensors(q=q, k=k, v=v, bias=bias, mask=mask, segment_ids=segment_ids)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise UsageError(
            "q, k and v must have 4 dimensions (batch, heads, tokens, head dim); "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    B, H, N, D = q.shape
    M = k.shape[2]
    if k.shape != (B, H, M, D) or v.shape != (B, H, M, D):
        raise UsageError(
            "k and v must agree with q in batch, heads and head dim, and with each other in tokens; "
            f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if D == 0:
        raise UsageError(f"q, k and v must have a head dim of at least 1, got {tuple(q.shape)}")
    is_floating = q.dtype.is_floating_point and q.dtype.itemsize > 1  # 8 bits are for storage alone
    if not dtype_of(q) == dtype_of(k) == dtype_of(v) or not is_floating:
        raise UsageError(
            f"q, k and v must share one floating dtype of 16 bits or more; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    for name, x in (("k", k), ("v", v), ("bias", bias), ("mask", mask), ("segment_ids", segment_ids)):
        if x is not None and x.device != q.device:
            raise UsageError(f"{name} is on {x.device}, q on {q.device}; move them to one device")
    if bias is not None:
        if not bias.dtype.is_floating_point:
            raise UsageError(f"bias must be floating, got {bias.dtype}; a boolean keep-mask goes to mask=")
        _check_broadcast("bias", bias, (B, H, N, M))
    if mask is not None:
        if mask.dtype != torch.bool:
            raise UsageError(f"mask must be boolean (True keeps), got {mask.dtype}; an additive mask goes to bias=")
        _check_broadcast("mask", mask, (B, H, N, M))
    not_whole = segment_ids is not None and (segment_ids.dtype.is_floating_point or segment_ids.dtype.is_complex)
    if segment_ids is not None and (not_whole or segment_ids.shape != (B, N) or N != M):
        raise UsageError(
            "segment_ids must be integers of shape (batch, tokens), for self-attention; "
            f"got {segment_ids.dtype} {tuple(segment_ids.shape)} for q {tuple(q.shape)} and {M} keys"
        )
    if type(is_causal) not in (bool, torch.SymBool):  # each kernel would take something else for true
        raise UsageError(f"is_causal must be True or False, got {is_causal!r}")
    if not 0.0 <= dropout_p < 1.0:
        raise UsageError(f"dropout_p must lie in [0, 1), got {dropout_p}")


def _check_tensors(**given) -> None:
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v", "qkv")):
            raise UsageError(f"{name} must be a torch tensor, got {type(x).__name__}; torch.as_tensor makes one")


def _check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    first = len(shape) - x.ndim
    fits = 1 <= x.ndim <= len(shape) and all(x.shape[i] in (1, shape[first + i]) for i in range(x.ndim))
    if not fits:
        raise UsageError(f"{name} must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(x.shape)}")


def _number(scale) -> float:
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        raise UsageError("scale is a number for the kernels, without a gradient: pass scale=1.0, and q * scale for q")
    return float(scale)


_runners = BoundedCache()  # a call without extras -> the backend that runs it


class AttentionBackend:
    """softmax(scale * q kᵀ + bias) v, with SDPA's semantics, on either of the layouts a model has.

    A backend overrides `_attend` and, where its kernel takes the projection's own layout, `_attend_qkvpacked`.

    Keywords of both entry points:
        bias: floating, broadcastable to (B, H, N, M), added after scaling; differentiable. -inf masks.
        mask: boolean, broadcastable to (B, H, N, M); True keeps.
        segment_ids: integers (B, N) that 32 bits hold; a token attends to the tokens that carry its own id.
        is_causal: query i sees keys 0..i (aligned at the top left, as in SDPA).
        scale: a number, which has no gradient; defaults to D ** -0.5.
        dropout_p: probability of dropping an attention weight; the caller passes 0 in evaluation.
    All of them combine. A query with no key left gets zeros, and so do its gradients. Under torch.autocast q, k and v
    are cast to its dtype, as for SDPA.

    A call that the backend cannot take raises UsageError (a ValueError) with `unsupported`'s reason.
    """

    name: str

    def __deepcopy__(self, memo) -> "AttentionBackend":
        return self  # it has no state of its own that changes; a copied model runs the same one

    def configured(self, **options) -> "AttentionBackend":
        """This backend with options of its own, those beside `name` in conf/attn/<name>.yaml; UsageError if unknown."""
        if options:
            raise UsageError(f"attention backend {self.name!r} has no options, got {', '.join(options)}")
        return self

    def unavailable(self) -> str | None:
        """Why this backend cannot run on this machine at all and what would mend it; None when it can."""
        return None

    def _unsupported(self, problem: Problem) -> str | None:
        return None

    def _attend(self, q_BHND, k_BHMD, v_BHMD, *, bias, mask, segment_ids, is_causal, scale, dropout_p) -> Tensor:
        raise NotImplementedError

    def _attend_qkvpacked(self, qkv_BN3HD: Tensor, **keywords) -> Tensor:
        q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        return self._attend(q_BHND, k_BHND, v_BHND, **keywords).transpose(1, 2).flatten(2)

    def unsupported(self, problem: Problem | Tensor, *args, **keywords) -> str | None:
        """Why this backend refuses a `Problem`, or a call with these tensors; None when it takes it."""
        if not isinstance(problem, Problem):
            problem = Problem.of(problem, *args, **keywords)
        return self.unavailable() or self._unsupported(problem)

    def _runner(self, problem: Problem) -> "AttentionBackend":
        """The backend that runs such a problem, this one; UsageError if it does not take it."""
        reason = self.unsupported(problem)
        if reason is not None:
            raise UsageError(f"attention backend {self.name!r} cannot take this call: {reason}")
        return self

    def _runner_of_call(self, tensors, bias, mask, segment_ids, is_causal, dropout_p) -> "AttentionBackend":
        """tensors: q, k and v, or packed qkv alone, cast. To look at them anew takes longer than a short kernel."""

        def found() -> AttentionBackend:
            views = tensors if len(tensors) == 3 else tensors[0].permute(2, 0, 3, 1, 4).unbind(0)
            return self._runner(Problem.of(*views, bias, mask, segment_ids, is_causal, dropout_p=dropout_p))

        if bias is not None or mask is not None or segment_ids is not None or not runs_eagerly(tensors):
            return found()
        call = self, is_causal, type(is_causal), dropout_p, *[(x.shape, x.dtype, x.device) for x in tensors]
        runner = _runners.get(call)
        if runner is None:
            runner = _runners[call] = found()
        return runner

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
    ) -> Tensor:
        """(B, H, N, D), (B, H, M, D), (B, H, M, D) -> (B, H, N, D) in q's dtype, or autocast's where that is on."""
        try:
            q_BHND, k_BHMD, v_BHMD = tensors = cast(q_BHND, k_BHMD, v_BHMD)
        except AttributeError:
            _check_tensors(q=q_BHND, k=k_BHMD, v=v_BHMD)
            raise
        return self._runner_of_call(tensors, bias, mask, segment_ids, is_causal, dropout_p)._attend(
            q_BHND,
            k_BHMD,
            v_BHMD,
            bias=bias,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=is_causal,
            scale=q_BHND.shape[-1] ** -0.5 if scale is None else _number(scale),
            dropout_p=dropout_p,
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
    ) -> Tensor:
        """The projection's own (B, N, 3, H, D) -> (B, N, H * D), ready for the output projection."""
        if not isinstance(qkv_BN3HD, Tensor) or qkv_BN3HD.ndim != 5 or qkv_BN3HD.shape[2] != 3:
            _check_tensors(qkv=qkv_BN3HD)
            raise UsageError(f"qkv must be (batch, tokens, 3, heads, head dim), got {tuple(qkv_BN3HD.shape)}")
        (qkv_BN3HD,) = tensors = cast(qkv_BN3HD)
        return self._runner_of_call(tensors, bias, mask, segment_ids, is_causal, dropout_p)._attend_qkvpacked(
            qkv_BN3HD,
            bias=bias,
            mask=mask,
            segment_ids=segment_ids,
            is_causal=is_causal,
            scale=qkv_BN3HD.shape[-1] ** -0.5 if scale is None else _number(scale),
            dropout_p=dropout_p,
        )


def keep_mask(
    q_BHND: Tensor, k_BHMD: Tensor, mask: Tensor | None, segment_ids: Tensor | None, is_causal: bool
) -> Tensor | None:
    """Mask, segments and causality as one boolean, broadcastable to (B, H, N, M); None when all keys are kept."""
    keep = mask
    if segment_ids is not None:
        same_B1NN = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        keep = same_B1NN if keep is None else keep & same_B1NN
    if is_causal:
        N, M = q_BHND.shape[2], k_BHMD.shape[2]
        lower_NM = torch.ones(N, M, dtype=torch.bool, device=q_BHND.device).tril()
        keep = lower_NM if keep is None else keep & lower_NM
    return keep
