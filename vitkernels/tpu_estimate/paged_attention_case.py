"""The problem sizes at which paged attention is benchmarked and estimated."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PagedAttentionCase:
    """Sizes of a call: `tokens` is the length of each sequence, or the maximum of random lengths if `ragged`."""

    what: str
    sequences: int
    query_heads: int
    key_heads: int
    head_dim: int
    page_size: int
    tokens: int
    ragged: bool = False


CASES = (
    PagedAttentionCase("decoding, few sequences", 8, 32, 8, 128, 16, 4096),
    PagedAttentionCase("pages of 128, ragged", 64, 32, 8, 128, 128, 4096, ragged=True),
    PagedAttentionCase("one key head per query head, ragged", 32, 12, 12, 64, 128, 4096, ragged=True),
    # The tokens of a frame share their context and are passed as query heads: 196 per key head.
    PagedAttentionCase("a frame of a video ViT", 8, 12 * 196, 12, 64, 128, 8192),
    PagedAttentionCase("decoding, many sequences", 64, 32, 8, 128, 16, 2048),
    PagedAttentionCase("decoding, ragged", 64, 32, 8, 128, 16, 4096, ragged=True),
    PagedAttentionCase("decoding, one long sequence", 1, 32, 8, 128, 128, 32768),
)
