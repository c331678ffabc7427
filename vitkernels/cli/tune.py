"""`python -m vitkernels.tune`: measure the ops' backends on this GPU, and keep what was found for `auto`.

    python -m vitkernels.tune                                         # the sizes of vit_base_patch16_224
    python -m vitkernels.tune --model vit_large_patch16_224 --batch-size 64

Says what it measured and the file it wrote. `backend="auto"` reads that file before the measurements that come with the
package; the log of a run says which of them it used.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from vitkernels.errors import UsageError
from vitkernels.provenance import versions
from vitkernels.registry import tuning_table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m vitkernels.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["vit_base_patch16_224"], help="timm models, or this package's")
    parser.add_argument("--batch-size", type=int, default=128, help="images of a step")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--table", type=Path, default=tuning_table.user_table(), help="the file to write")
    options = parser.parse_args(arguments)
    try:
        for name in options.model:
            tune(name, options.batch_size, options.dtype, options.table)
    except torch.OutOfMemoryError:
        sys.exit(f"error: {name} at --batch-size {options.batch_size} does not fit this GPU: give fewer images")
    except UsageError as error:
        sys.exit(f"error: {error}")


def tune(model: str, batch_size: int, dtype: str, table: Path) -> None:
    """Measures every op at the sizes of one model, prints them and adds them to the table."""
    if not torch.cuda.is_available():
        raise UsageError(
            "tune compares kernels on an NVIDIA GPU, and PyTorch sees none here: look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES; without a GPU there is nothing to tune"
        )
    from vitkernels.benchmarks import ops as bench

    sizes = sizes_of(model, batch_size)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: {model}, batch {batch_size}, {dtype}, forward and backward on the device")
    for make in bench.cases(sizes, getattr(torch, dtype)):
        case = make()
        found = bench.measure(case)
        _print(case, found)
        measured = {name: ms for name, ms in found.items() if isinstance(ms, float)}
        tuning_table.write(table, gpu, [_row(case, dtype, measured)])  # each at once: the next may not fit the GPU
        del case
        torch.cuda.empty_cache()
    print(f"written: {table}")


def _row(case, dtype: str, ms: dict[str, float]) -> dict:
    known = versions()
    return {
        "op": case.op,
        "dtype": dtype,
        "features": case.features,
        "rows": case.rows,
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "versions": {name: known[name] for name in ("torch", "triton")},
        "date": time.strftime("%Y-%m-%d"),
    }


def _print(case, found: dict[str, float | str]) -> None:
    print(f"\n{case.op} {' x '.join(map(str, case.features))}, {case.rows} rows")
    for name, value in sorted(found.items(), key=lambda item: (isinstance(item[1], str), item[1])):
        print(f"  {name:12}" + (f"{value:8.3f} ms" if isinstance(value, float) else f"  not: {value}"))


def sizes_of(name: str, batch_size: int):
    """The sizes that a model of that name has, from a model without memory."""
    from vitkernels import models
    from vitkernels.benchmarks.ops import ModelSizes

    image_size, _ = models.input_spec(name)
    with torch.device("meta"):
        model = models.timm_model(name)
    try:
        first = model.blocks[0].mlp.fc1
        patch, tokens = model.patch_embed.patch_size[0], model.patch_embed.num_patches + model.num_prefix_tokens
    except (AttributeError, TypeError) as error:
        raise UsageError(f"{name!r} has no patch embedding or no MLP of linear, GELU, linear: {error}") from error
    return ModelSizes(batch_size, tokens, first.in_features, first.out_features, image_size, patch)


if __name__ == "__main__":
    main()
