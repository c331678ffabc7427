"""data.decode=cuda: which files workers pass on, the pixels that the device computes, and unusual files.

On the CPU, Pillow stands in for the GPU.
"""

import io
import logging
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from expecting import error
from finished_batches import finished_epoch
from PIL import Image
from test_decode import encoded, photo

from vitkernels.data import IGNORE, imagefolder, images
from vitkernels.data.decode import Decoder, choose_decoder, nvimagecodec, torchvision_nvjpeg
from vitkernels.data.decode.gpu import file_decoder
from vitkernels.data.device_crops import DeviceCrop, DeviceCropper, DeviceCrops
from vitkernels.data.geometry import Crop

CPU = torch.device("cpu")
MIXED = {"mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}}


def pillow_decode(files):
    """Decode as the GPU does, to images that are not upright; refuse a batch with a file that holds the word POISON."""
    decoded = []
    for file in files:
        data = file.numpy().tobytes()
        if b"POISON" in data:
            raise RuntimeError("Error while decoding JPEG images: 5\ndetails")
        decoded.append(torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1))
    return decoded


@pytest.fixture
def on_cpu(monkeypatch):
    """Let decode=cuda decode on the CPU, by Pillow."""
    monkeypatch.setattr(images, "choose_decoder", lambda name, on_gpu: choose_decoder(name, on_gpu=True))
    monkeypatch.setattr(images, "file_decoder", lambda log: pillow_decode)
    monkeypatch.setattr(images, "DeviceCropper", partial(DeviceCropper, device=CPU))


def write(path, image: Image.Image, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)


@pytest.fixture
def root(tmp_path):
    """Photos of several sizes in two classes, 12 to train and 5 to validate in each."""
    for split, count in (("train", 12), ("val", 5)):
        for target, name in enumerate("ab"):
            for number in range(count):
                size = (150 + 17 * number, 120 + 29 * (number % 4))
                write(tmp_path / "r" / split / name / f"{number}.jpg", photo(*size, seed=number + 50 * target))
    return tmp_path / "r"


def build(root, decode="cuda", **settings):
    given = {"image_size": 48, "in_chans": 3, "seed": 0, "batch_size": 8, "num_workers": 0, "decode": decode}
    return imagefolder.build(**given | {"root": str(root)} | settings)


def raw_epoch(loader, number=0, start=0):
    return list(loader.epoch(number, start))


def worst(batches, others) -> int:
    """Return the largest difference of pixels; all else must be equal."""
    differences = []
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"pixels"}:
            assert torch.equal(one[name], other[name]), name
        differences.append((one["pixels"].int() - other["pixels"].int()).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("settings", [
    {}, MIXED, {"color_jitter": 0.4, "re_prob": 0.5}, {"crop_mode": "border"}, {"crop_mode": "squash", "crop_pct": 1.0},
    {"interpolation": "bilinear"}, {"interpolation": "random"},
], ids=str)  # fmt: skip
def test_device__pixels_and_draws_match_pillow(on_cpu, root, settings):
    ours, pillows = build(root, **settings), build(root, "pillow", **settings)
    # The device rounds once, in float32; Pillow rounds to 8 bits after each of its two passes.
    assert worst(raw_epoch(ours.train), raw_epoch(pillows.train)) <= 2
    assert worst(raw_epoch(ours.val), raw_epoch(pillows.val)) <= 2
    assert not ours.train.fallbacks and not ours.val.fallbacks


def test_workers__pass_on_undecoded_files(on_cpu, root):
    loader = build(root).train
    raw, problems = loader._batches[0, 0]
    paths = loader.describe(loader.sample_ids(0, 0))
    assert not problems and raw["pixels"].rows == 8 and len(raw["pixels"].pixels) == 0
    for path, (row, file, plan) in zip(paths, raw["pixels"].crops(), strict=True):
        with open(path, "rb") as stored, Image.open(path) as image:
            assert file.numpy().tobytes() == stored.read() and plan.image_size == image.size
        assert paths[row] == path and (plan.height, plan.width) == (48, 48)


@pytest.mark.parametrize("fails", [False, True], ids=["decoded", "left to Pillow"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation__is_applied_on_the_device(orientation, fails):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(60, 40), exif=exif) + b"POISON" * fails
    image = Decoder("cuda").open(data)
    width, height = image.size
    plan = DeviceCrop(data, image.orientation, image.size, Crop(0, 0, height, width), height, width, "bicubic")
    square = DeviceCrops.of([plan], max(width, height))
    pixels, problems = DeviceCropper([0, 0, 0], pillow_decode, CPU)(square)
    top, left = (60 - height) // 2, (60 - width) // 2
    expected = Decoder("pillow").decode(Decoder("pillow").open(data))
    assert np.array_equal(pixels[0, :, top : top + height, left : left + width].permute(1, 2, 0).numpy(), expected)
    assert [problem.lost for problem in problems] == [False] * fails


STRANGE = {
    "png": (encoded(photo(60, 50), "png"), "not a JPEG file"),
    "progressive": (encoded(photo(60, 50), progressive=True), "progressive JPEG"),
    "cmyk": (encoded(photo(60, 50).convert("CMYK")), "JPEG in CMYK"),
    "rgb": (encoded(photo(60, 50), keep_rgb=True), "JPEG in RGB"),
    "16 bits": (encoded(Image.fromarray(np.full((50, 60), 40_000, np.uint16)), "png"), "not a JPEG file"),
    "large": (encoded(photo(1000, 900)), "JPEG much larger than the model's images"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_file__is_decoded_by_a_worker_and_counted(on_cpu, root, kind, caplog):
    data, reason = STRANGE[kind]
    for split in ("train", "val"):
        (root / split / "a" / "0.jpg").write_bytes(data)
    caplog.set_level(logging.INFO)
    ours = build(root)
    found = raw_epoch(ours.val)
    assert ours.val.fallbacks == {reason: 1} and not ours.val.bad_images
    assert sum(reason in message for message in caplog.messages) == 2  # the first one, and the count of the epoch
    expected = raw_epoch(build(root, "auto").val)
    assert worst(found, expected) <= 2
    assert torch.equal(found[0]["pixels"][0], expected[0]["pixels"][0])  # as the worker's own decoder has it


def test_gray__jpeg_is_decoded_on_the_device(on_cpu, root):
    (root / "val" / "a" / "0.jpg").write_bytes(encoded(photo(60, 50).convert("L")))
    ours = build(root)
    assert worst(raw_epoch(ours.val), raw_epoch(build(root, "pillow").val)) <= 2 and not ours.val.fallbacks


def test_trailing_bytes__do_not_make_a_file_truncated():
    exif = Image.Exif()
    exif[0x010E] = "with a thumbnail's end \xff\xd9"
    complete = encoded(photo(60, 50), exif=exif)
    for data in (complete, complete + b"trailing bytes", complete + complete):
        assert Decoder("cuda").open(data).fallback is None
    for data in (complete[:-2], complete[: len(complete) // 2]):
        assert Decoder("cuda").open(data).fallback == "truncated JPEG"


@pytest.mark.parametrize("settings", [{}, MIXED], ids=["plain", "mixed"])
def test_corrupt_files__are_masked_and_counted_as_by_other_decoders(on_cpu, root, settings):
    (root / "train" / "a" / "1.jpg").write_bytes(encoded(photo(60, 50))[:700])
    (root / "train" / "b" / "2.jpg").write_bytes(b"\xff\xd8\xff no image")
    ours, pillows = (build(root, name, max_bad_share=1, **settings) for name in ("cuda", "pillow"))
    for one, other in zip(finished_epoch(ours.train, 0), finished_epoch(pillows.train, 0), strict=True):
        assert torch.equal(one[1], other[1]) and (one[0] - other[0]).abs().max() < 2.01 / 255 / 0.224
    assert ours.train.bad_images.keys() == pillows.train.bad_images.keys() and len(ours.train.bad_images) == 2


@pytest.mark.parametrize("settings", [{}, MIXED], ids=["plain", "mixed"])
def test_file__that_only_pillow_decodes_is_decoded_by_pillow_and_counted(on_cpu, root, settings):
    expected = list(finished_epoch(build(root, **settings).train, 0))
    path = root / "train" / "a" / "1.jpg"
    path.write_bytes(path.read_bytes() + b"POISON")
    data = build(root, **settings)
    for one, other in zip(finished_epoch(data.train, 0), expected, strict=True):
        assert all(map(torch.equal, one, other))
    (reason,) = data.train.fallbacks
    assert reason == "on the GPU: Error while decoding JPEG images: 5" and not data.train.bad_images


def unreadable(root):
    """Damage one file in a way that only decoding finds: the worker reads no more than the header."""
    path = root / "train" / "a" / "1.jpg"
    data = bytearray(path.read_bytes())
    table = data.index(b"\xff\xc4") + 5
    data[table : table + 16] = b"\xff" * 16  # more codes than a Huffman table holds
    path.write_bytes(data + b"POISON\xff\xd9")
    return path


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_file__that_no_decoder_reads_leaves_its_partner_unmixed_in_pixels_and_target(on_cpu, root, mode):
    unreadable(root)
    settings = {"max_bad_share": 1, "mixup": {**MIXED["mixup"], "mode": mode}}
    ours, pillows = (build(root, name, **settings) for name in ("cuda", "pillow"))
    for epoch in range(4):  # the partner is of the other class in some of them
        for one, other in zip(finished_epoch(ours.train, epoch), finished_epoch(pillows.train, epoch), strict=True):
            assert torch.equal(one[1], other[1]) and (one[0] - other[0]).abs().max() < 2.01 / 255 / 0.224
    assert len(ours.train.bad_images) == 1 == len(pillows.train.bad_images)


@pytest.mark.parametrize("settings", [{}, MIXED], ids=["plain", "mixed"])
def test_file__that_no_decoder_reads_is_black_and_without_a_target(on_cpu, root, settings):
    path = unreadable(root)
    built = build(root, max_bad_share=1, **settings)
    lost = 0
    for number, (batch, targets) in enumerate(finished_epoch(built.train, 0)):
        names = built.train.describe(built.train.sample_ids(0, number))
        for row, name in enumerate(names):
            if name == str(path):
                lost += 1
                assert not batch[row].any()
                assert (not targets[row].any()) if settings else targets[row] == IGNORE
            else:
                assert batch[row].any()
    assert lost == 1 and list(built.train.bad_images) == [str(path)]
    with pytest.raises(RuntimeError, match="could not be read"):
        strict = build(root, max_bad_share=0, **settings)
        for other in "03":
            shutil.copy(path, path.with_name(f"{other}.jpg"))
        raw_epoch(strict.train)


@pytest.mark.parametrize("settings", [{}, MIXED], ids=["plain", "mixed"])
def test_resume__continues_with_the_same_batches(on_cpu, root, settings):
    data = build(root, **settings)
    whole = raw_epoch(data.train, 1)
    assert len(whole) == 3 and worst(raw_epoch(build(root, **settings).train, 1, start=1), whole[1:]) == 0


@pytest.mark.slow
def test_workers__make_the_batches_of_one_process(on_cpu, root):
    assert worst(raw_epoch(build(root, num_workers=2).train), raw_epoch(build(root).train)) == 0


def test_share__is_chosen_by_image_and_epoch_alone(on_cpu, root):
    def on_device(epoch: int, batch_size: int) -> set[int]:
        loader = build(root, cuda_share=0.5, batch_size=batch_size).train
        chosen = set()
        for number in range(loader.batches_per_epoch):
            ids, raw = loader.sample_ids(epoch, number), loader._batches[epoch, number][0]["pixels"]
            assert len(raw.plans) + len(raw.pixels) == batch_size
            chosen |= {ids[row] for row, _, _ in raw.crops()}
        return chosen

    assert 4 <= len(on_device(0, 8)) <= 20  # of 24; outside with probability 0.0008, and the draw is fixed
    assert on_device(0, 8) == on_device(0, 4) != on_device(1, 8)
    loader = build(root, cuda_share=0.5).train
    assert worst(raw_epoch(loader), raw_epoch(build(root, "pillow").train)) <= 2 and not loader.fallbacks
    with error("data.value", setting="cuda_share", value=1.5):
        build(root, cuda_share=1.5)


def test_auto_augment__makes_workers_decode_and_logs_it(on_cpu, root, caplog):
    caplog.set_level(logging.INFO)
    settings = {"auto_augment": "rand-m9-mstd0.5-inc1"}
    ours, workers = build(root, **settings), build(root, "auto", **settings)
    assert worst(raw_epoch(ours.train), raw_epoch(workers.train)) == 0
    assert worst(raw_epoch(ours.val), raw_epoch(workers.val)) <= 2
    reason = "auto_augment=rand-m9-mstd0.5-inc1 runs in the workers, at twice the time per image or more"
    assert caplog.messages.count(f"{reason}: decode=turbo for train") == 1


def test_pictures__of_single_images_are_on_the_cpu(on_cpu, root):
    ours, pillows = (build(root, name).val.load([0, 7]) for name in ("cuda", "pillow"))
    assert ours.device == CPU and (ours - pillows).abs().max() < 2.01 / 255 / 0.224


def test_cuda__is_refused_without_a_gpu_before_any_work():
    with error("data.decode", decode="cuda") as refused:
        build("/no/such/folder")
    assert all(name in str(refused.value) for name in ("auto", "turbo", "pillow"))


@pytest.mark.parametrize("installed", [True, False])
def test_file_decoder__is_nvimagecodec_if_installed_and_the_log_names_it(monkeypatch, caplog, installed):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(nvimagecodec, "is_installed", lambda: installed)
    decode = file_decoder(logging.getLogger())
    assert decode is (nvimagecodec.decode if installed else torchvision_nvjpeg.decode)
    assert ("nvImageCodec decodes" in caplog.text) == installed == ("pip install" not in caplog.text)


# ---- on the GPU ----


@pytest.fixture(params=["torchvision", "nvImageCodec"])
def on_gpu(request, monkeypatch, root):
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    if request.param == "torchvision":
        monkeypatch.setattr(nvimagecodec, "is_installed", lambda: False)
    elif not nvimagecodec.is_installed():
        pytest.skip("nvImageCodec is not installed")
    return partial(build, root, pin_memory=True)


only_torchvision = pytest.mark.parametrize("on_gpu", ["torchvision"], indirect=True)
only_nvimagecodec = pytest.mark.parametrize("on_gpu", ["nvImageCodec"], indirect=True)


@pytest.mark.gpu
@only_nvimagecodec
@pytest.mark.parametrize(
    "options", [{"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2}, {"gray": True}], ids=str
)
def test_nvimagecodec__is_within_one_level_of_pillow_before_the_resize(on_gpu, root, options):
    for path in root.glob("*/*/*.jpg"):
        with Image.open(path) as image:
            image.load()
        if options.get("gray"):
            image.convert("L").save(path)
        else:
            image.save(path, quality=90, **options)
    ours, pillows = on_gpu(), build(root, "pillow")
    # A level of the decoder, then two of the resize: the device rounds once, Pillow after each of its two passes.
    assert worst(to_cpu(raw_epoch(ours.val)), raw_epoch(pillows.val)) <= 3
    assert worst(to_cpu(raw_epoch(ours.train)), raw_epoch(pillows.train)) <= 3
    assert not ours.train.fallbacks and not ours.val.fallbacks


def to_cpu(batches):
    return [{name: x.cpu() for name, x in batch.items()} for batch in batches]


@pytest.mark.gpu
@only_torchvision
def test_torchvision__with_full_chroma_is_within_a_few_levels_of_pillow(on_gpu, root):
    """4:4:4: nvJPEG's inverse DCT and color conversion round otherwise than libjpeg's, by 1 each before the resize."""
    for split in ("train", "val"):
        for path in (root / split).glob("*/*.jpg"):
            with Image.open(path) as image:
                image.load()
            image.save(path, quality=95, subsampling=0)
    for ours, other in zip(raw_epoch(on_gpu().train), raw_epoch(build(root, "pillow").train), strict=True):
        difference = (ours["pixels"].cpu().int() - other["pixels"].int()).abs()
        assert ours["pixels"].is_cuda and difference.max() <= 6 and difference.float().mean() < 1.0


@pytest.mark.gpu
@only_torchvision
def test_torchvision__with_halved_chroma_is_close_to_pillow_except_at_colored_edges(on_gpu, root):
    """4:2:0: nvJPEG and libjpeg enlarge chroma by different filters, so pixels at colored edges differ by more."""
    ours, pillows = on_gpu(), build(root, "pillow")
    for one, other in zip(raw_epoch(ours.val), raw_epoch(pillows.val), strict=True):
        difference = (one["pixels"].cpu().int() - other["pixels"].int()).abs().float()
        assert difference.mean() < 2.0 and difference.quantile(0.999) < 24, difference.max()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STRANGE)
def test_on_gpu__strange_file_is_decoded_by_a_worker(on_gpu, root, kind):
    data, reason = STRANGE[kind]
    (root / "val" / "a" / "0.jpg").write_bytes(data)
    ours = on_gpu()
    first = next(iter(ours.val.epoch(0)))
    assert torch.equal(first["pixels"][0].cpu(), build(root, "auto").val._batches[0, 0][0]["pixels"][0])
    assert ours.val.fallbacks == {reason: 1}


@pytest.mark.gpu
def test_on_gpu__damage_in_the_middle_is_an_image_or_a_masked_row(on_gpu, root):
    path = root / "val" / "a" / "0.jpg"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :])
    (root / "val" / "a" / "1.jpg").write_bytes(data[:-2])
    built = on_gpu(max_bad_share=1)
    batches = raw_epoch(built.val)
    assert sum(map(len, (batch["targets"] for batch in batches))) == 16
    expected = raw_epoch(build(root, "pillow", max_bad_share=1).val)
    difference = (batches[0]["pixels"][2:].cpu().int() - expected[0]["pixels"][2:].int()).abs().float()
    assert difference.mean() < 2.0  # the other rows are what they are without it


@pytest.mark.gpu
@pytest.mark.parametrize(
    "decode, settings",
    [("cuda", {}), ("cuda", MIXED), ("cuda", {"cuda_share": 0.5}), ("auto", {}), ("auto", MIXED)],
    ids=str,
)
def test_on_gpu__resume_is_exact_bit_for_bit_with_any_number_of_workers(on_gpu, decode, settings):
    """cuda: the device decodes; auto: it resizes what workers decode."""
    whole = raw_epoch(on_gpu(decode, num_workers=2, **settings).train, 1)
    assert worst(raw_epoch(on_gpu(decode, **settings).train, 1, start=1), whole[1:]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("decode", ["cuda", "auto"])
def test_on_gpu__feed_hands_over_what_the_loader_makes(on_gpu, decode):
    from vitkernels import runtime

    data = on_gpu(decode, num_workers=2)
    expected = raw_epoch(data.train, 0)
    for _ in range(3):
        fed = list(runtime.create("cuda", "bf16").feed(data.train.epoch(0)))
        for one, other in zip(fed, expected, strict=True):
            assert all(one[name].is_cuda and torch.equal(one[name].cpu(), other[name].cpu()) for name in other)
