"""VisionTransformers without a name in timm, as arguments of timm's VisionTransformer."""

PRESETS = {
    # ViT-B/16 at 256 px, common in TPU kernel benchmarks: 256 tokens, no class token, average pooling.
    "vit_b16_256": {
        "img_size": 256,
        "patch_size": 16,
        "embed_dim": 768,
        "depth": 12,
        "num_heads": 12,
        "class_token": False,
        "global_pool": "avg",
    },
    # 16 tokens; learns the handwritten digits on two CPU cores in a minute.
    "vit_digits": {
        "img_size": 16,
        "patch_size": 4,
        "in_chans": 1,
        "embed_dim": 96,
        "depth": 4,
        "num_heads": 3,
        "class_token": False,
        "global_pool": "avg",
    },
}
