"""`vitkernels embed`: pooled features of image files, the input of the classifier head.

    vitkernels embed runs/pets holiday/ --out features.npz
    vitkernels embed runs/pets holiday/ --out features.parquet

.npz holds `features` (N, D) and `files` (N,); .parquet has one row for each file, and needs vitkernels[shards].
"""

import argparse
import sys
from pathlib import Path

from vitkernels.cli.model_options import add_model_options, on_device, report
from vitkernels.inference.images import find_images
from vitkernels.inference.tables import write_features


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="vitkernels embed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--out", type=Path, default=Path("features.npz"), help="file to write, .npz or .parquet")
    options = parser.parse_args(arguments)
    model = on_device(options)
    count, width = write_features(model, find_images(options.images), options.out)
    print(f"{count} images, {width} features each: {options.out}")
    return report(count, model)


if __name__ == "__main__":
    sys.exit(main())
