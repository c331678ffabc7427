"""A worked example: a ViT encodes videos frame by frame, with its keys and values in a paged cache.

    python -m vitkernels.ops.paged_attention.example

Every token of a new frame attends to its entire frame and to all earlier frames, whose keys and values are cached, so a
new frame costs the work of one frame instead of the entire video. Streams start, end and grow independently and share
one pool of pages; no page is reserved for future frames.

paged_attention takes one query token per sequence. The tokens of a frame share their context, as query heads share a
key head in grouped-query attention, so they are passed as N query heads per key head.

Shape suffixes: B streams, N tokens of a frame, C channels, H heads, D head dim, P pages, S tokens per page.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitkernels.errors import UsageError
from vitkernels.ops import paged_attention


class PagedCache:
    """Store the keys and values of one attention layer, and the pages of the pool that each stream owns."""

    def __init__(self, streams: int, heads: int, pages: int, page_size: int, head_dim: int, **like):
        self.keys, self.values = (torch.empty(heads, pages, page_size, head_dim, **like) for _ in range(2))
        self.tokens = [0] * streams
        self.tables: list[list[int]] = [[] for _ in range(streams)]
        self._free = list(range(pages))

    def append(self, stream: int, k_HND: Tensor, v_HND: Tensor) -> None:
        """Append tokens to a stream; UsageError if the pool has too few free pages."""
        S = self.keys.shape[2]
        first, end = self.tokens[stream], self.tokens[stream] + k_HND.shape[1]
        table = self.tables[stream]
        needed = -(-end // S) - len(table)
        if needed > len(self._free):
            raise UsageError(
                f"{needed} pages needed, {len(self._free)} free; release a stream, or use a larger pool",
                code="ops.paged_attention.pool_full", needed=needed, free=len(self._free),
            )  # fmt: skip
        table += [self._free.pop() for _ in range(needed)]
        at_N = torch.arange(first, end)
        page_N, row_N = torch.tensor(table)[at_N // S], at_N % S
        self.keys[:, page_N, row_N] = k_HND
        self.values[:, page_N, row_N] = v_HND
        self.tokens[stream] = end

    def release(self, stream: int) -> None:
        """Return a stream's pages to the pool."""
        self._free += self.tables[stream]
        self.tables[stream], self.tokens[stream] = [], 0

    def lookup(self, streams: list[int]) -> tuple[Tensor, Tensor]:
        """Return context_lens and block_tables of these streams."""
        longest = max(len(self.tables[b]) for b in streams)
        tables = [self.tables[b] + [-1] * (longest - len(self.tables[b])) for b in streams]  # -1 entries are never read
        device = self.keys.device
        return torch.tensor([self.tokens[b] for b in streams], device=device), torch.tensor(tables, device=device)


class StreamingAttention(nn.Module):
    """timm's Attention, sharing its parameters, over all frames that its streams have received."""

    def __init__(self, attention: Any, streams: int, pages: int, page_size: int, backend: str = "auto"):
        super().__init__()
        self.attention, self.backend = attention, backend
        weight = attention.qkv.weight
        like = {"device": weight.device, "dtype": weight.dtype}
        self.cache = PagedCache(streams, attention.num_heads, pages, page_size, attention.head_dim, **like)
        self.streams = list(range(streams))  # the streams of the next call's frames

    def forward(self, x_BNC: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise UsageError(
                "StreamingAttention fixes the mask: a frame attends to itself and to earlier frames",
                code="ops.paged_attention.mask",
            )
        B, N, C = x_BNC.shape
        attention: Any = self.attention
        qkv = attention.qkv(x_BNC).view(B, N, 3, attention.num_heads, attention.head_dim)
        q_BHND, k_BHND, v_BHND = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_BHND, k_BHND = attention.q_norm(q_BHND), attention.k_norm(k_BHND)
        for b, k_HND, v_HND in zip(self.streams, k_BHND, v_BHND, strict=True):
            self.cache.append(b, k_HND, v_HND)
        out = paged_attention(
            (q_BHND * attention.scale).flatten(1, 2),
            self.cache.keys,
            self.cache.values,
            *self.cache.lookup(self.streams),
            pages_per_compute_block=4,
            backend=self.backend,
        )
        return attention.proj(out.view(q_BHND.shape).transpose(1, 2).reshape(B, N, C))


class VideoStream:
    """Run a timm VisionTransformer over streams of frames. Replaces the model's attention layers.

    pages: the size of each layer's pool, shared by all streams.
    """

    def __init__(self, vit: Any, streams: int, pages: int, page_size: int = 16, backend: str = "auto"):
        self.vit = vit.eval()
        for block in self.vit.blocks:
            block.attn = StreamingAttention(block.attn, streams, pages, page_size, backend)

    @torch.no_grad()
    def push(self, frames: Tensor, streams: list[int]) -> Tensor:
        """Encode one new frame (3, height, width) of each of these streams; return the features (B, N, C)."""
        for block in self.vit.blocks:
            block.attn.streams = streams
        return self.vit.forward_features(frames)

    def release(self, stream: int) -> None:
        """End a stream and free its pages."""
        for block in self.vit.blocks:
            block.attn.cache.release(stream)


def main() -> None:
    """Encode two interleaved streams, then a third one on the pages of the first."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vit: Any = VisionTransformer(img_size=64, patch_size=8, embed_dim=192, depth=4, num_heads=3, num_classes=0)
    video = VideoStream(vit.to(device), streams=3, pages=40)
    for streams in ([0], [0, 1], [0, 1], [1]):
        features = video.push(torch.randn(len(streams), 3, 64, 64, device=device), streams)
        print(f"frames for {streams}: features {tuple(features.shape)}, tokens {vit.blocks[0].attn.cache.tokens}")
    video.release(0)
    video.push(torch.randn(1, 3, 64, 64, device=device), [2])
    print(f"stream 0 released, stream 2 started: pages {vit.blocks[0].attn.cache.tables}")


if __name__ == "__main__":
    main()
