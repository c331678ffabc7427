"""What every attention backend is tested on: the one list of ViT shapes, and how exact each dtype can be."""

import torch

# Tokens of the usual ViTs, with and without a class token; one token; a long sequence.
LENGTHS = (1, 49, 196, 197, 256, 257, 577, 640, 729, 1025, 4096)
HEAD_DIMS = tuple(range(32, 129, 8))
# No multiples of 8: a backend refuses them, or is right.
ODD_HEAD_DIMS = (1, 7, 36, 50, 100, 127)
# (B, H): more than two or three of each. The interpreters take seconds for those of a model.
MANY = ((3, 4), (1, 6), (5, 1), (9, 16))
INTERPRETED_MANY = 12

# Interpreted on a CPU these take seconds per head beyond this length; on their own device they run all of LENGTHS.
INTERPRETED = ("triton_flash", "pallas_flash")
INTERPRETED_LENGTH = 257

# ‖x - reference‖ / ‖reference‖ against float64.
TOLERANCE = {
    # Sums of up to 4096 products that each round to 2⁻²⁴: 64 · 6e-8 = 4e-6 if the errors were random; exp adds some.
    torch.float32: 1e-5,
    # 2⁻¹² for rounding to float16, in the weights, in the result, and in scores that reach 4: a few times 2.4e-4.
    torch.float16: 3e-3,
    # The same with 2⁻⁹.
    torch.bfloat16: 2e-2,
}


def batch_and_heads(tokens: int) -> tuple[int, int]:
    """Enough of both to notice when they are mixed up, and less where the interpreter would take long."""
    return (2, 3) if tokens < 64 else (1, 2)
