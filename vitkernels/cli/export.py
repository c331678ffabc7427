"""`vitkernels export`: write a run's weights for timm, the hub, torch.export or ONNX.

    vitkernels export runs/pets --format onnx --out pets.onnx
    vitkernels export runs/pets --which last --format timm --out pets

Programs are loaded again and compared with plain timm before the command ends. Nothing is uploaded.
"""

import argparse
from pathlib import Path

from vitkernels.inference import WHICH, open_trained
from vitkernels.inference.export_formats import FORMATS, export


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="vitkernels export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a run, or a weights file in it")
    parser.add_argument("--which", choices=sorted(WHICH), default="best", help="which weights of the run to export")
    parser.add_argument("--format", choices=list(FORMATS), default="timm", help="timm writes a folder")
    parser.add_argument("--out", type=Path, help="default: export/ in the run's folder")
    options = parser.parse_args(arguments)
    trained = open_trained(options.run, options.which)
    out = options.out or _default(trained.run or options.run, options.format)
    difference = export(trained, options.format, out)
    checked = "" if difference is None else f"; logits differ from timm's by at most {difference:.1e}"
    print(f"{trained.weights} -> {out}{checked}")


def _default(run: Path, kind: str) -> Path:
    suffix = FORMATS[kind].suffix
    return run / "export" if suffix is None else run / "export" / f"model{suffix}"


if __name__ == "__main__":
    main()
