"""The worked example: streamed frames match attention over all frames so far."""

import copy

import pytest
import torch
from expecting import error
from timm.models.vision_transformer import VisionTransformer

from vitkernels.ops.paged_attention.example import VideoStream, main


def make_vit():
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=0, qk_norm=True
    ).eval()


@torch.no_grad()
def features_of(vit, video):
    """Return the last frame's features, computed from all frames (F, 3, height, width) by timm's masked attention."""
    tokens_FNC = vit.norm_pre(vit._pos_embed(vit.patch_embed(video)))
    frame = torch.arange(len(video)).repeat_interleave(tokens_FNC.shape[1])
    x = tokens_FNC.flatten(0, 1)[None]
    for block in vit.blocks:
        x = block(x, attn_mask=frame[:, None] >= frame[None])
    return vit.norm(x)[0, -tokens_FNC.shape[1] :]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_video_stream__matches_attention_over_the_entire_video(backend):
    """17 tokens per frame on pages of 8, so frames end inside pages. Streams interleave; one ends and one starts."""
    vit = make_vit()
    video = VideoStream(copy.deepcopy(vit), streams=2, pages=16, page_size=8, backend=backend)
    seen = {0: [], 1: []}

    def push(*streams):
        frames = torch.randn(len(streams), 3, 32, 32)
        for stream, frame in zip(streams, frames, strict=True):
            seen[stream].append(frame)
        for stream, features in zip(streams, video.push(frames, list(streams)), strict=True):
            # Float32 sums of two blocks in a different order, of features near 1.
            torch.testing.assert_close(features, features_of(vit, torch.stack(seen[stream])), atol=2e-5, rtol=0)

    push(0)
    push(0, 1)
    push(1, 0)
    push(0)
    video.release(0)
    seen[0] = []
    push(0, 1)


def test_video_stream__refuses_a_frame_without_free_pages():
    video = VideoStream(make_vit(), streams=1, pages=3, page_size=8)
    video.push(torch.randn(1, 3, 32, 32), [0])
    with error("ops.paged_attention.pool_full", needed=2, free=0):
        video.push(torch.randn(1, 3, 32, 32), [0])


def test_example__prints_tokens_and_pages(capsys):
    main()
    printed = capsys.readouterr().out
    assert "tokens [195, 195, 0]" in printed and "pages [[], [" in printed
