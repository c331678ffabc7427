"""The worked example: frames streamed one by one give what full attention over the frames so far gives."""

import copy

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from vitkernels.errors import UsageError
from vitkernels.ops.paged_attention.example import VideoStream, main


def make_vit():
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=0, qk_norm=True
    ).eval()


@torch.no_grad()
def features_of(vit, video):
    """The last frame's, all frames (F, 3, height, width) computed anew with timm's own attention under a mask."""
    tokens_FNC = vit.norm_pre(vit._pos_embed(vit.patch_embed(video)))
    frame = torch.arange(len(video)).repeat_interleave(tokens_FNC.shape[1])
    x = tokens_FNC.flatten(0, 1)[None]
    for block in vit.blocks:
        x = block(x, attn_mask=frame[:, None] >= frame[None])
    return vit.norm(x)[0, -tokens_FNC.shape[1] :]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_streamed_frames_are_as_good_as_whole_videos(backend):
    """17 tokens a frame on pages of 8: no frame ends at a page's edge. Streams interleave, one ends, one begins."""
    vit = make_vit()
    video = VideoStream(copy.deepcopy(vit), streams=2, pages=16, page_size=8, backend=backend)
    seen = {0: [], 1: []}

    def push(*streams):
        frames = torch.randn(len(streams), 3, 32, 32)
        for stream, frame in zip(streams, frames, strict=True):
            seen[stream].append(frame)
        for stream, features in zip(streams, video.push(frames, list(streams)), strict=True):
            # Two blocks' float32 sums in another order, of features near 1.
            torch.testing.assert_close(features, features_of(vit, torch.stack(seen[stream])), atol=2e-5, rtol=0)

    push(0)
    push(0, 1)
    push(1, 0)
    push(0)
    video.release(0)
    seen[0] = []
    push(0, 1)


def test_an_empty_pool_says_so():
    video = VideoStream(make_vit(), streams=1, pages=3, page_size=8)
    video.push(torch.randn(1, 3, 32, 32), [0])
    with pytest.raises(UsageError, match="2 pages needed, 0 left: release a stream"):
        video.push(torch.randn(1, 3, 32, 32), [0])


def test_the_printed_walk_through(capsys):
    main()
    printed = capsys.readouterr().out
    assert "tokens [195, 195, 0]" in printed and "stream 0 gone, 2 begun: pages [[], [" in printed
