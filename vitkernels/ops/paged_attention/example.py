"""A worked example: a ViT looks at videos as their frames come in, with its keys and values in a paged cache.

    python -m vitkernels.ops.paged_attention.example

Every token of a new frame attends to the whole frame and to all frames before it. What those gave as keys and values
lies in the cache, so a new frame costs one frame's work, not the video's. Streams start, end and grow at their own pace
and share one pool of pages: none is reserved for frames that may never come.

paged_attention takes one query token per sequence. A frame's tokens share their context, as query heads share a key
head in grouped-query attention: so they go in as such, N query heads to each key head.

Shape suffixes: B streams, N tokens of a frame, C channels, H heads, D head dim, P pages, S tokens per page.
"""

import torch
from torch import Tensor, nn

from vitkernels.errors import UsageError
from vitkernels.ops import paged_attention


class PagedCache:
    """Keys and values of one attention layer, and which pages of the pool belong to which stream."""

    def __init__(self, streams: int, heads: int, pages: int, page_size: int, head_dim: int, **like):
        self.keys, self.values = (torch.empty(heads, pages, page_size, head_dim, **like) for _ in range(2))
        self.tokens = [0] * streams
        self.tables: list[list[int]] = [[] for _ in range(streams)]
        self._free = list(range(pages))

    def append(self, stream: int, k_HND: Tensor, v_HND: Tensor) -> None:
        """Adds tokens at a stream's end; raises UsageError when the pool has too few pages left."""
        S = self.keys.shape[2]
        first, end = self.tokens[stream], self.tokens[stream] + k_HND.shape[1]
        table = self.tables[stream]
        needed = -(-end // S) - len(table)
        if needed > len(self._free):
            raise UsageError(f"{needed} pages needed, {len(self._free)} left: release a stream, or make a larger pool")
        table += [self._free.pop() for _ in range(needed)]
        at_N = torch.arange(first, end)
        page_N, row_N = torch.tensor(table)[at_N // S], at_N % S
        self.keys[:, page_N, row_N] = k_HND
        self.values[:, page_N, row_N] = v_HND
        self.tokens[stream] = end

    def release(self, stream: int) -> None:
        """Gives a stream's pages back."""
        self._free += self.tables[stream]
        self.tables[stream], self.tokens[stream] = [], 0

    def lookup(self, streams: list[int]) -> tuple[Tensor, Tensor]:
        """context_lens and block_tables of these streams."""
        longest = max(len(self.tables[b]) for b in streams)
        tables = [self.tables[b] + [-1] * (longest - len(self.tables[b])) for b in streams]  # -1 is never looked at
        device = self.keys.device
        return torch.tensor([self.tokens[b] for b in streams], device=device), torch.tensor(tables, device=device)


class StreamingAttention(nn.Module):
    """timm's Attention with the same parameters, over all frames that its streams have brought so far."""

    def __init__(self, attention: nn.Module, streams: int, pages: int, page_size: int, backend: str = "auto"):
        super().__init__()
        self.attention, self.backend = attention, backend
        weight = attention.qkv.weight
        like = {"device": weight.device, "dtype": weight.dtype}
        self.cache = PagedCache(streams, attention.num_heads, pages, page_size, attention.head_dim, **like)
        self.streams = list(range(streams))  # whose frames the next call brings

    def forward(self, x_BNC: Tensor, attn_mask: None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise UsageError("what a frame sees is fixed: itself and the frames before it")
        B, N, C = x_BNC.shape
        attention = self.attention
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
    """A timm VisionTransformer over streams of frames. Takes the model over: its attention layers get caches.

    pages: of each layer's pool, for all streams together.
    """

    def __init__(self, vit: nn.Module, streams: int, pages: int, page_size: int = 16, backend: str = "auto"):
        self.vit = vit.eval()
        for block in vit.blocks:
            block.attn = StreamingAttention(block.attn, streams, pages, page_size, backend)

    @torch.no_grad()
    def push(self, frames: Tensor, streams: list[int]) -> Tensor:
        """One new frame (3, height, width) for each of these streams; their tokens' features (B, N, C)."""
        for block in self.vit.blocks:
            block.attn.streams = streams
        return self.vit.forward_features(frames)

    def release(self, stream: int) -> None:
        """Forgets a stream: its pages go to others."""
        for block in self.vit.blocks:
            block.attn.cache.release(stream)


def main() -> None:
    """Two streams at their own pace, then a third on the pages of the first."""
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vit = VisionTransformer(img_size=64, patch_size=8, embed_dim=192, depth=4, num_heads=3, num_classes=0)
    video = VideoStream(vit.to(device), streams=3, pages=40)
    for streams in ([0], [0, 1], [0, 1], [1]):
        features = video.push(torch.randn(len(streams), 3, 64, 64, device=device), streams)
        print(f"frames for {streams}: features {tuple(features.shape)}, tokens {vit.blocks[0].attn.cache.tokens}")
    video.release(0)
    video.push(torch.randn(1, 3, 64, 64, device=device), [2])
    print(f"stream 0 gone, 2 begun: pages {vit.blocks[0].attn.cache.tables}")


if __name__ == "__main__":
    main()
