"""read_state_dict, adapt_state_dict and load_weights: file formats, fine-tuning and mismatches."""

import os
import pickle
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from expecting import error
from safetensors.torch import save_file
from timm.utils import CheckpointSaver, ModelEmaV3

from vitkernels import models
from vitkernels.errors import UsageError
from vitkernels.models import read_state_dict


def tiny(**kwargs):
    sizes = {"img_size": 16, "embed_dim": 48, "depth": 1, "num_heads": 3, **kwargs}
    return models.create_model("vit_tiny_patch16_224", "native", **{"patch_size": 8, "num_classes": 3, **sizes})


def test_read_state_dict__reads_safetensors_and_torch_files(tmp_path):
    model = models.create_model("vit_digits", "native", num_classes=10)
    torch.save({"model": model.state_dict(), "ema": None}, tmp_path / "a.pt")
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    for name in ("a.pt", "a.safetensors"):
        models.load_weights(model, models.read_state_dict(tmp_path / name), name)
    (tmp_path / "b.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:5000])
    for name, code in (("b.pt", "models.weights_unreadable"), ("none.pt", "models.weights_missing")):
        with error(code, path=str(tmp_path / name)):
            models.read_state_dict(tmp_path / name)


def test_load_weights__lists_mismatched_names():
    weights = tiny().state_dict()
    weights["extra"] = weights.pop("cls_token")
    with error("models.weights_mismatch", missing=["cls_token"], unexpected=["extra"], misshapen=["head.weight"]):
        models.load_weights(tiny(num_classes=5), weights | {"head.bias": torch.zeros(5)}, "a.pt")


def test_read_state_dict__prefers_the_ema_in_a_timm_checkpoint(tmp_path, caplog):
    model, average = tiny(), tiny()
    (tmp_path / "recovery").mkdir()
    saver = CheckpointSaver(
        torch.nn.Sequential(OrderedDict(module=model)),
        torch.optim.SGD(model.parameters(), lr=0.1),
        args=Namespace(model="vit", lr=0.1),
        model_ema=ModelEmaV3(average),
        checkpoint_dir=str(tmp_path),
    )
    saver.unwrap_fn = lambda wrapped: wrapped
    saver.save_checkpoint(epoch=0, metric=50.0)
    with caplog.at_level("INFO", "vitkernels"):
        weights = models.read_state_dict(tmp_path / "last.pth.tar")
    assert "EMA (state_dict_ema)" in caplog.text
    assert weights.keys() == model.state_dict().keys()  # the wrapper's prefix is removed
    assert torch.equal(weights["blocks.0.attn.qkv.weight"], average.blocks[0].attn.qkv.weight)


def test_adapt_state_dict__resamples_positions_and_reinitializes_the_head(caplog):
    pretrained, model = tiny(), tiny(num_classes=5, img_size=32)
    one_for_all_patches = torch.randn(48)
    pretrained.pos_embed.data[:, 1:] = one_for_all_patches
    weights = pretrained.state_dict()
    with caplog.at_level("INFO", "vitkernels"):
        models.load_weights(model, models.adapt_state_dict(weights, model, new_classes=False), "a.pt")
    assert "from 5 to 17 tokens" in caplog.text and "head reinitialized" in caplog.text
    assert torch.equal(model.blocks[0].attn.qkv.weight, pretrained.blocks[0].attn.qkv.weight)
    assert torch.equal(model.pos_embed[:, :1], pretrained.pos_embed[:, :1])  # of the class token
    # A constant stays constant, up to float32 rounding of bicubic weights that sum to 1.
    torch.testing.assert_close(model.pos_embed[0, 1:], one_for_all_patches.expand(16, -1))


def test_load_weights__image_size_message():
    """A snapshot of the wording."""
    shapes = r"pos_embed \(1, 17, 48\) \(the model has \(1, 5, 48\)\)"
    with pytest.raises(UsageError, match=rf"^weights of a.pt do not match the model: .*{shapes}; .* set img_size"):
        models.load_weights(tiny(), tiny(img_size=32).state_dict(), "a.pt")


def test_adapt_state_dict__new_classes_reinitialize_a_head_of_the_same_size():
    pretrained, model = tiny(), tiny()
    weights = pretrained.state_dict()
    own = model.head.weight.detach().clone()
    assert torch.equal(models.adapt_state_dict(weights, model, new_classes=True)["head.weight"], own)
    assert torch.equal(
        models.adapt_state_dict(weights, model, new_classes=False)["head.weight"], pretrained.head.weight
    )


def test_adapt_state_dict__missing_head_is_reinitialized(caplog):
    model, headless = tiny(), tiny(num_classes=0)
    with caplog.at_level("INFO", "vitkernels"):
        models.load_weights(model, models.adapt_state_dict(headless.state_dict(), model, new_classes=False), "a.pt")
    assert "head reinitialized" in caplog.text
    assert torch.equal(model.patch_embed.proj.weight, headless.patch_embed.proj.weight)


def test_adapt_state_dict__other_width_still_does_not_match():
    pretrained, model = tiny(), tiny(embed_dim=24)
    with error("models.weights_mismatch", missing=[], unexpected=[]) as caught:
        models.load_weights(model, models.adapt_state_dict(pretrained.state_dict(), model, new_classes=False), "a.pt")
    assert "img_size" not in str(caught.value)


class _Malicious:
    def __reduce__(self):
        return os.system, ("touch /tmp/executed",)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("weights.pt", b"101 things to do\n", "text file"),
        ("weights.pt", b"", "empty"),
        ("weights.pt", pickle.dumps(_Malicious()), "refused for safety"),
        ("weights.pt", pickle.dumps({"weights": _Malicious()}, protocol=2), "refused for safety"),
        ("weights.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "text file"),
        ("weights.safetensors", b"", "empty"),
    ],
)
def test_read_state_dict__describes_files_without_weights(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    with error("models.weights_unreadable", path=str(path)) as caught:
        read_state_dict(path)
    assert expected in str(caught.value)


def test_read_state_dict__refuses_a_malicious_torch_file(tmp_path):
    torch.save({"weights": _Malicious()}, tmp_path / "weights.pt")
    with error("models.weights_unreadable") as caught:
        read_state_dict(tmp_path / "weights.pt")
    assert "refused for safety" in str(caught.value) and "system" in str(caught.value)


def test_read_state_dict__reports_a_folder_without_a_checkpoint(tmp_path):
    with error("checkpoint.invalid") as caught:
        read_state_dict(tmp_path)
    assert "no state.json" in str(caught.value) and "Errno" not in str(caught.value)
