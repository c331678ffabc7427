"""Decoding only the upper rows of a JPEG file gives the same pixels, and refuses the same files, as decoding it all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from simplejpeg import encode_jpeg
from test_decode import PLAIN, encoded, photo

from vitkernels.data.augment import TrainAugmentation
from vitkernels.data.decode import Decoder
from vitkernels.data.decode.jpeg_header import cut_below, read_header
from vitkernels.data.randomness import Stream, seeded_globals

PILLOW, TURBO = Decoder("pillow"), Decoder("turbo")


def decoded(decoder: Decoder, data: bytes, rows: int | None = None) -> np.ndarray | None:
    """Return the pixels; None if the file is no image."""
    try:
        return decoder.decode(decoder.open(data), rows=rows)
    except Exception:  # a broken file can make a decoder raise almost anything
        return None


def lowest(height: int, subsampling: str, rows: int) -> int:
    """Return the rows that must be decoded for the first `rows`: whole units, and the next one for vertical chroma."""
    unit = 16 if subsampling in ("420", "440") else 8
    return min(height, -(-(rows + (unit == 16)) // unit) * unit)


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411", "Gray"])
@settings(max_examples=40, deadline=None)
@given(st.data())
def test_upper_rows__equal_those_of_the_whole_file_and_the_rest_is_not_decoded(subsampling, data):
    width, height = data.draw(st.integers(1, 90)), data.draw(st.integers(1, 130))
    rows = data.draw(st.integers(1, height))
    pixels = np.asarray(photo(width, height))
    color, pixels = ("GRAY", pixels[:, :, :1].copy()) if subsampling == "Gray" else ("RGB", pixels)
    file = encode_jpeg(pixels, data.draw(st.integers(30, 98)), color, subsampling)
    found, whole = decoded(TURBO, file, rows), decoded(PILLOW, file)
    assert found.shape == (lowest(height, subsampling, rows), width, 3)
    assert np.array_equal(found[:rows], whole[:rows])


OPTIONS = {
    "restarts by blocks": {"restart_marker_blocks": 3},
    "restarts by rows": {"restart_marker_rows": 1, "subsampling": 2},
    "own tables": {"optimize": True},
    "padded markers": {},
    "trailing bytes": {},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 47, 48, 100, 200])
def test_upper_rows__of_unusual_files(kind, rows):
    file = encoded(photo(150, 203), **OPTIONS[kind])
    if kind == "padded markers":
        file = file.replace(b"\xff\xc0\0\x11", b"\xff\xff\xff\xc0\0\x11")
    file += b"trailing" * (kind == "trailing bytes")
    found = decoded(TURBO, file, rows)
    assert len(found) < 203 or rows == 200
    assert np.array_equal(found[:rows], decoded(PILLOW, file)[:rows])


@pytest.mark.parametrize("kind", ["progressive", "turned"])
def test_file__that_must_be_read_to_its_end_is_decoded_whole(kind):
    exif = Image.Exif()
    exif[0x0112] = 6
    file = encoded(photo(60, 90), **({"progressive": True} if kind == "progressive" else {"exif": exif}))
    assert np.array_equal(decoded(TURBO, file, 16), decoded(PILLOW, file))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_file__is_the_image_or_the_error_that_pillow_makes_of_it(data):
    options = {"restart_marker_blocks": data.draw(st.sampled_from([0, 5])), "subsampling": data.draw(st.integers(0, 2))}
    file = bytearray(encoded(photo(64, 90), **options))
    first = data.draw(st.sampled_from([2, file.index(b"\xff\xda")]))
    at = data.draw(st.integers(first, len(file) - 3))
    removed, put = data.draw(st.integers(0, 20)), data.draw(st.binary(max_size=4))
    file[at : at + removed] = put
    rows = data.draw(st.integers(1, 90))
    found, whole = decoded(TURBO, bytes(file), rows), decoded(PILLOW, bytes(file))
    assert (found is None) == (whole is None)
    assert found is None or np.array_equal(found[:rows], whole[:rows])


@pytest.mark.parametrize("length", [-2, -100, 2000])
def test_truncated_file__is_no_image_whatever_rows_are_needed(length):
    file = encoded(photo(200, 200))[:length]
    assert cut_below(file, read_header(file), 16) is None
    # Without the end marker alone, all pixels are there, and Pillow accepts the file.
    assert [decoded(TURBO, file, rows) is None for rows in (1, 100, 200)] == [decoded(PILLOW, file) is None] * 3


def test_training_image__does_not_depend_on_the_rows_that_are_decoded(monkeypatch):
    file, augmentation = encoded(photo(120, 333)), TrainAugmentation(48, **PLAIN)

    def images():
        for index in range(20):
            with seeded_globals(0, Stream.SAMPLE, index):
                yield augmentation(TURBO.open(file), TURBO).pixels.numpy()

    from_parts, decode = list(images()), Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, image, reduction=1, rows=None: decode(self, image, reduction))
    assert all(np.array_equal(*pair) for pair in zip(from_parts, images(), strict=True))
