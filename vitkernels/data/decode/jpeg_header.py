"""Read the header of a JPEG file, and make files that have only its upper rows (ITU-T T.81, annex B)."""

from typing import NamedTuple

START, SCAN, END = b"\xff\xd8\xff", b"\xff\xda", b"\xff\xd9"
_EXIF = b"Exif\0\0"
_SEQUENTIAL = (b"\xff\xc0", b"\xff\xc1")  # a scan of such a frame stores each block once, from top to bottom


class JpegHeader(NamedTuple):
    """What precedes the pixels of a JPEG file.

    has_exif: whether it holds EXIF data.
    height, height_at: the number of pixel rows, and the offset of this number in the file; both 0 unless one sequential
        scan holds all components.
    unit: the number of pixel rows that are coded together.
    reach: the number of rows below a pixel that its color depends on.
    """

    has_exif: bool
    height: int = 0
    height_at: int = 0
    unit: int = 8
    reach: int = 0


def read_header(data: bytes) -> JpegHeader:
    """Return the header of a JPEG file, which may be damaged."""
    frame, scan = _segments(data)
    has_exif = data.find(_EXIF, 0, scan) >= 0
    if not frame or scan + 5 > len(data) or data[scan + 4] != data[frame + 9]:
        return JpegHeader(has_exif)
    factors = data[frame + 11 : frame + 11 + 3 * data[frame + 9] : 3]  # horizontal and vertical, 4 bits each
    rows = max((factor & 0xF for factor in factors), default=0)
    if not rows:
        return JpegHeader(has_exif)
    # libjpeg enlarges chroma that has fewer rows than luma by a filter over the neighboring rows.
    height = int.from_bytes(data[frame + 5 : frame + 7], "big")
    return JpegHeader(has_exif, height, frame + 5, unit=8 * rows, reach=int(rows > 1))


def cut_below(data: bytes, header: JpegHeader, rows: int) -> tuple[bytearray, int] | None:
    """Return a JPEG file whose first `rows` rows are those of `data`, and its height; None if it would be no lower.

    Only the height in the header differs: libjpeg decodes no further. An incomplete file also gives None, because
    whether it counts as an image must not depend on the rows that are read.
    """
    height = -(-(rows + header.reach) // header.unit) * header.unit
    if height >= header.height or not is_complete(data):
        return None
    cut = bytearray(data)
    cut[header.height_at : header.height_at + 2] = height.to_bytes(2, "big")
    return cut, height


def is_complete(data: bytes) -> bool:
    """Return whether the end marker of a JPEG file follows its last scan."""
    return data.endswith(END) or data.rfind(END) > data.rfind(SCAN)


def _segments(data: bytes) -> tuple[int, int]:
    """Return the offsets of the sequential frame, 0 if there is none, and of the first scan.

    The latter is the file's length if no scan is found.
    """
    at, frame = 2, 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at : at + 2]
        if marker == SCAN:
            return frame, at
        if marker == b"\xff\xff":  # markers may be padded
            at += 1
            continue
        if marker in _SEQUENTIAL:
            frame = at
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0, len(data)
