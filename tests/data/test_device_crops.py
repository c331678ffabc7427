"""Decoded crops that workers pass on and the device resizes: on the CPU by plain PyTorch, on a GPU by the kernel."""

from functools import partial

import numpy as np
import pytest
import torch
from finished_batches import finished_epoch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode import encoded, photo
from test_decode_on_device import MIXED, build, raw_epoch, worst, write

from vitkernels.data import images, shared_memory
from vitkernels.data.device_crops import DeviceCrop, DeviceCropper, DeviceCrops
from vitkernels.data.geometry import Crop

CPU = torch.device("cpu")
KEYS = [(epoch, batch) for epoch in range(3) for batch in range(3)]


@pytest.fixture
def root(tmp_path):
    """Photos of up to 2 x 2 times the model's 48 pixels, one of them as PNG, in two classes."""
    for split, count in (("train", 12), ("val", 5)):
        for target, name in enumerate("ab"):
            for number in range(count):
                size = (70 + 3 * number, 60 + 11 * (number % 4))
                kind = "png" if number == 3 else "jpg"
                write(tmp_path / "r" / split / name / f"{number}.{kind}", photo(*size, seed=number + 50 * target))
    return tmp_path / "r"


@pytest.fixture
def on_device(monkeypatch, root):
    """on_device(...) builds loaders whose crops are resized on the "device", the CPU."""
    monkeypatch.setattr(images, "_device_resizes", lambda decoder, on_gpu: not decoder.is_reference)
    monkeypatch.setattr(images, "DeviceCropper", partial(DeviceCropper, device=CPU))
    return partial(build, root, "auto")


@pytest.mark.parametrize("settings", [
    {}, MIXED, {"color_jitter": 0.4, "re_prob": 0.5}, {"crop_mode": "border"}, {"crop_mode": "squash", "crop_pct": 1.0},
    {"interpolation": "bilinear"}, {"interpolation": "random"},
], ids=str)  # fmt: skip
def test_device__pixels_and_draws_match_pillow(on_device, root, settings):
    ours, pillows = on_device(**settings), build(root, "pillow", **settings)
    for split in ("train", "val"):
        made = getattr(ours, split)._batches[0, 0][0]["pixels"]
        assert len(made.plans) == 8 and not len(made.pixels) and not made.encoded
        # The device rounds once, in float32; Pillow rounds to 8 bits after each of its two passes.
        assert worst(raw_epoch(getattr(ours, split)), raw_epoch(getattr(pillows, split))) <= 2
    assert ours.val.fallbacks.keys() == {"not a JPEG file"}


def test_large_crops__are_resized_in_the_worker(on_device, root, monkeypatch):
    for name in "ab":
        write(root / "val" / name / "0.jpg", photo(300, 220))
    ours = on_device().val
    made = ours._batches[0, 0][0]["pixels"]
    assert made.pixel_rows.tolist() == [0, 5] and len(made.plans) == 6
    monkeypatch.undo()
    expected = raw_epoch(build(root, "auto").val)[0]["pixels"]
    found = raw_epoch(ours)[0]["pixels"]
    assert torch.equal(found[[0, 5]], expected[[0, 5]]) and (found.int() - expected.int()).abs().max() <= 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_needed_part__makes_the_same_square_as_the_whole_image(data):
    width, height = data.draw(st.integers(2, 120)), data.draw(st.integers(2, 120))
    size, side = (data.draw(st.integers(2, 90)), data.draw(st.integers(2, 90))), data.draw(st.integers(1, 48))
    pixels, everything = np.array(photo(width, height)), Crop(0, 0, height, width)
    mode, made = data.draw(st.sampled_from(["bilinear", "bicubic"])), []
    for part in (everything, everything.needed(*size, side)):
        crop = DeviceCrop.of_pixels(pixels, part, everything, size, mode)
        batch = DeviceCrops.of([crop], side, torch.from_numpy(crop.data.reshape(-1)))
        made.append(DeviceCropper((9, 99, 199), device=CPU)(batch)[0])
    assert torch.equal(*made)


def test_evaluation__passes_on_only_what_the_center_needs(on_device, root):
    for name in "ab":
        (root / "val" / name / "3.png").unlink()
        for path in (root / "val" / name).iterdir():
            write(path, photo(54, 110))
    made = on_device(crop_pct=1.0).val._batches[0, 0][0]["pixels"]
    for _, pixels, crop in made.crops():
        width, height = crop.image_size
        assert width == 54 and 54 < height < 64 and len(pixels) == 3 * width * height


@pytest.mark.parametrize("settings", [{}, MIXED], ids=["plain", "mixed"])
def test_corrupt_files__are_masked_and_counted_as_by_other_decoders(on_device, root, settings):
    (root / "train" / "a" / "1.jpg").write_bytes(encoded(photo(60, 50))[:700])
    (root / "train" / "b" / "2.jpg").write_bytes(b"\xff\xd8\xff no image")
    ours, pillows = on_device(max_bad_share=1, **settings), build(root, "pillow", max_bad_share=1, **settings)
    for one, other in zip(finished_epoch(ours.train, 0), finished_epoch(pillows.train, 0), strict=True):
        assert torch.equal(one[1], other[1]) and (one[0] - other[0]).abs().max() < 2.01 / 255 / 0.224
    assert ours.train.bad_images.keys() == pillows.train.bad_images.keys() and len(ours.train.bad_images) == 2


@pytest.mark.parametrize("settings", [{"auto_augment": "rand-m9-mstd0.5-inc1"}, {"interpolation": "lanczos"}], ids=str)
def test_steps_that_need_a_worker__keep_the_resize_there(on_device, root, monkeypatch, settings):
    ours = on_device(**settings).train
    monkeypatch.undo()
    assert worst(raw_epoch(ours), raw_epoch(build(root, "auto", **settings).train)) == 0
    assert isinstance(ours._batches[0, 0][0]["pixels"], torch.Tensor)


def test_size_that_differs_from_the_header__is_resized_in_the_worker(on_device, root):
    """Pillow reports the size of an icon's slot, here 256 × 256, and decodes the image in it, here 64 × 64."""
    image = encoded(photo(64, 64), "png")
    icon = b"ic08" + (len(image) + 8).to_bytes(4) + image
    for split in ("train", "val"):
        for path in (root / split / "a").glob("[01].jpg"):
            path.write_bytes(b"icns" + (len(icon) + 8).to_bytes(4) + icon)
    settings = {"crop_pct": 1.0, "scale": [1.0, 1.0], "ratio": [1.0, 1.0], "hflip": 0.0}
    for pixels_are_passed_on in (True, False):
        made = (on_device if pixels_are_passed_on else partial(build, root, "pillow"))(image_size=128, **settings)
        found = made.val._batches[0, 0][0]["pixels"]
        if pixels_are_passed_on:
            assert found.pixel_rows.tolist() == [0, 1] and len(found.plans) == 6
            assert (found.plans[:, -9:-7] <= 128 * 2).all()
        whole = torch.cat([batch["pixels"] for split in (made.train, made.val) for batch in raw_epoch(split)])
        expected = torch.from_numpy(np.array(photo(64, 64).resize((128, 128)))).permute(2, 0, 1).int()
        assert sum((each.int() - expected).abs().max() <= 2 for each in whole) == 4
        assert not made.train.bad_images and not made.val.bad_images


def test_worker__puts_pixels_into_shared_memory_that_the_loader_need_not_copy(on_device, monkeypatch):
    batches = on_device().train._batches
    alone = batches[0, 1][0]["pixels"]
    monkeypatch.setattr(shared_memory, "get_worker_info", lambda: "of a worker")
    shared = batches[0, 1][0]["pixels"]
    assert shared.data.is_shared() and not alone.data.is_shared() and torch.equal(shared.data, alone.data)


def test_worker__fills_its_memory_again_once_the_loader_has_pinned_it(on_device, monkeypatch):
    batches = on_device().train._batches
    alone = [batches[0, number][0]["pixels"].data for number in range(2)]
    monkeypatch.setattr(shared_memory, "get_worker_info", lambda: "of a worker")
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    first = batches[0, 0][0]["pixels"]
    pinned = first.pin_memory()
    second, third = (batches[0, 1][0]["pixels"] for _ in range(2))
    assert second.data.data_ptr() == first.data.data_ptr() != third.data.data_ptr()
    assert torch.equal(pinned.data, alone[0]) and torch.equal(second.data, alone[1])


def test_resume__continues_with_the_same_batches(on_device):
    whole = raw_epoch(on_device(**MIXED).train, 1)
    assert len(whole) == 3 and worst(raw_epoch(on_device(**MIXED).train, 1, start=1), whole[1:]) == 0


@pytest.mark.slow
def test_workers__make_the_same_batches_in_used_memory(on_device, monkeypatch):
    expected = [batch[0]["pixels"].data for batch in map(on_device().train._batches.__getitem__, KEYS)]
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    loader, pinned, known = on_device(num_workers=2).train, [], 0
    for epoch in range(3):
        loader._keys[:] = [(epoch, batch) for batch in range(3)]
        for batch, _ in loader._dataloader:
            crops = batch["pixels"]
            assert crops.data.is_shared() and not crops.plans.is_shared() and not batch["targets"].is_shared()
            known += crops.data.untyped_storage()._cdata in {kept._cdata for kept in loader._mappings._kept.values()}
            pinned.append(crops.pin_memory())
            loader._mappings.keep(pinned[-1].taken)
    assert 3 <= known == len(pinned) - len(loader._mappings._kept)
    assert all(torch.equal(crops.data, each) for crops, each in zip(pinned, expected, strict=True))


@pytest.mark.slow
def test_workers__make_the_batches_of_one_process(on_device):
    assert worst(raw_epoch(on_device(num_workers=2).train), raw_epoch(on_device().train)) == 0


def test_pictures__of_single_images_are_on_the_cpu(on_device, root):
    ours, pillows = on_device().val.load([0, 7]), build(root, "pillow").val.load([0, 7])
    assert ours.device == CPU and (ours - pillows).abs().max() < 2.01 / 255 / 0.224


# ---- on the GPU ----


@pytest.fixture
def on_gpu(root):
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    return partial(build, root, "auto", pin_memory=True)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"interpolation": "bilinear"}, {"crop_mode": "border"}], ids=str)
def test_on_gpu__pixels_match_pillow(on_gpu, root, settings):
    ours, pillows = on_gpu(**settings), build(root, "pillow", **settings)
    for split in ("train", "val"):
        batches = raw_epoch(getattr(ours, split))
        assert batches[0]["pixels"].is_cuda
        on_cpu = [{name: values.cpu() for name, values in batch.items()} for batch in batches]
        assert worst(on_cpu, raw_epoch(getattr(pillows, split))) <= 2


@pytest.mark.gpu
def test_on_gpu__workers_that_use_memory_again_make_the_batches_of_one_process(on_gpu):
    several, alone = on_gpu(num_workers=2).train, on_gpu().train
    for epoch in range(3):
        assert worst(raw_epoch(several, epoch), raw_epoch(alone, epoch)) == 0
    assert 1 <= len(several._mappings._kept) <= 6 and not alone._mappings._kept
