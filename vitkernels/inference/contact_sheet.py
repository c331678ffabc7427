"""Draw images with their labels in a grid: a contact sheet."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from vitkernels.files import write_atomically

TILE, MARGIN, LINE = 144, 8, 16  # pixels
MOST = 100  # tiles


def contact_sheet(tiles: Sequence[tuple[Image.Image, Sequence[str]]], path: Path, columns: int = 8) -> None:
    """Write a PNG with one tile for each (image, lines of text), in order.

    Images keep their aspect ratio; small ones are enlarged without smoothing, so that their pixels show.
    """
    columns = max(1, min(columns, len(tiles)))
    lines = max((len(text) for _, text in tiles), default=0)
    width, height = TILE + MARGIN, TILE + lines * LINE + MARGIN
    sheet = Image.new("RGB", (columns * width + MARGIN, math.ceil(len(tiles) / columns) * height + MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.truetype(_font_file(), size=11)
    for number, (image, text) in enumerate(tiles):
        x, y = MARGIN + number % columns * width, MARGIN + number // columns * height
        scale = TILE / max(image.size)
        smooth = Image.Resampling.NEAREST if scale > 2 else Image.Resampling.LANCZOS
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        picture = image.convert("RGB").resize(size, smooth)
        sheet.paste(picture, (x + (TILE - size[0]) // 2, y + (TILE - size[1]) // 2))
        for row, line in enumerate(text):
            draw.text((x, y + TILE + row * LINE), _fitting(line, font), fill="black", font=font)
    write_atomically(path, lambda file: sheet.save(file, "PNG"))


def _font_file() -> Path:
    """Return matplotlib's DejaVu Sans: Pillow's own font has no letters beyond English."""
    import matplotlib  # not at the top: it is slow to import

    return Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


def _fitting(line: str, font: ImageFont.FreeTypeFont) -> str:
    """Return the line, cut off with … if it is wider than a tile."""
    if font.getlength(line) <= TILE:
        return line
    while line and font.getlength(line + "…") > TILE:
        line = line[:-1]
    return line + "…"
