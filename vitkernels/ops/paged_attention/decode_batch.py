"""The arguments that the contract of paged_attention passes to a backend."""

from typing import NamedTuple

from torch import Tensor


class DecodeBatch(NamedTuple):
    """One query token for each sequence of a batch, and the paged cache; documented in `paged_attention`.

    Shapes and options are checked. On devices other than the CPU, and under torch.compile, the values of context_lens
    and block_tables are not.
    """

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    context_lens: Tensor
    block_tables: Tensor
    pages_per_compute_block: int
    megacore_mode: str | None = None
    soft_cap: float | None = None
