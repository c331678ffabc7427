"""Orders of an epoch that read few shards at a time.

Shapes: N images, M shards.
"""

import numpy as np


def windowed_order(draw: np.random.Generator, starts: np.ndarray, window: int | None) -> np.ndarray:
    """Return an order of all images in which each stays near the other images of its shard, int64 (N,).

    The shards are shuffled and put one after another, and the images of each `window` positions are shuffled. A window
    reads at most ceil(window / shard) + 1 shards. Every order within a window is equally likely. Images of one shard
    are always in one window or in neighboring ones: of the other b - 1 images of a batch, about
    (b - 1) * shard / window come from the same shard as a given one, instead of (b - 1) * shard / N. None shuffles all
    images.

    Args:
        starts: the first image of each shard, and N; int64 (M + 1,).
        window: images that are shuffled together.
    """
    count = int(starts[-1])
    if window is None or window >= count:
        return draw.permutation(count)
    shards = draw.permutation(len(starts) - 1)
    order = np.concatenate([np.arange(starts[shard], starts[shard + 1]) for shard in shards])
    for begin in range(0, count, window):
        draw.shuffle(order[begin : begin + window])
    return order


def shard_sequence(order: np.ndarray, starts: np.ndarray) -> list[int]:
    """Return the shards of an order's images, each where it is first read."""
    count = len(starts) - 1
    shards = np.repeat(np.arange(count), np.diff(starts))[order]
    first = np.empty(count, dtype=np.int64)
    first[shards[::-1]] = np.arange(len(order))[::-1]  # the last one written remains: the first
    return np.argsort(first).tolist()
