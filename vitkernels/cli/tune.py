"""`vitkernels tune`: measure the backends of each op on this GPU, and store the results for backend="auto".

    vitkernels tune                                         # the sizes of vit_base_patch16_224
    vitkernels tune --model vit_large_patch16_224 --batch-size 64

Prints the measurements and the file they are written to. backend="auto" reads that file before the measurements that
come with the package; a run's log names the one it used.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vitkernels.benchmarks import ops as bench
from vitkernels.errors import UsageError
from vitkernels.provenance import versions
from vitkernels.registry import tuning_table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="vitkernels tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["vit_base_patch16_224"], help="models of timm or this package")
    parser.add_argument("--batch-size", type=int, default=128, help="images per step")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--table", type=Path, default=tuning_table.user_table(), help="file to write")
    options = parser.parse_args(arguments)
    try:
        for name in options.model:
            tune(name, options.batch_size, options.dtype, options.table)
    except torch.OutOfMemoryError:
        sys.exit(f"error: out of GPU memory for {name} with --batch-size {options.batch_size}; lower --batch-size")
    except UsageError as error:
        sys.exit(f"error: {error}")


def tune(model: str, batch_size: int, dtype: str, table: Path) -> None:
    """Measure every op at the sizes of one model, print the times and add them to the table.

    Raises UsageError: "tune.no_gpu" without an NVIDIA GPU, and the errors of `sizes_of`.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "tune compares kernels on an NVIDIA GPU, but PyTorch finds none; check nvidia-smi and CUDA_VISIBLE_DEVICES",
            code="tune.no_gpu",
        )
    sizes = sizes_of(model, batch_size)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}: {model}, batch {batch_size}, {dtype}, time on the device of forward and backward")
    for make in bench.cases(sizes, getattr(torch, dtype)):
        case = make()
        found = bench.measure(case)
        _print(case, found)
        measured = {name: ms for name, ms in found.items() if isinstance(ms, float)}
        tuning_table.write(table, gpu, [_row(case, dtype, measured)])  # at once: the next case may exceed the memory
        del case
        torch.cuda.empty_cache()
    print(f"written to {table}")


def sizes_of(name: str, batch_size: int) -> bench.ModelSizes:
    """Return the sizes of the model's ops, without allocating the model.

    Raises UsageError: "tune.model" for a model without a patch embedding or without an MLP of linear, GELU, linear.
    """
    from vitkernels import models

    image_size, _ = models.input_spec(name)
    with torch.device("meta"):
        model: Any = models.timm_model(name)
    try:
        first = model.blocks[0].mlp.fc1
        patch, tokens = model.patch_embed.patch_size[0], model.patch_embed.num_patches + model.num_prefix_tokens
    except (AttributeError, TypeError) as error:
        message = f"model {name!r} has no patch embedding, or no MLP of linear, GELU, linear: {error}"
        raise UsageError(message, code="tune.model", name=name) from error
    return bench.ModelSizes(batch_size, tokens, first.in_features, first.out_features, image_size, patch)


def _row(case: bench.OpCase, dtype: str, ms: dict[str, float]) -> dict:
    installed = versions()
    return {
        "op": case.op,
        "dtype": dtype,
        "features": case.features,
        "rows": case.rows,
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "versions": {name: installed[name] for name in ("torch", "triton")},
        "date": time.strftime("%Y-%m-%d"),
    }


def _print(case: bench.OpCase, found: dict[str, float | str]) -> None:
    print(f"\n{case.op} {' x '.join(map(str, case.features))}, {case.rows} rows")
    for name, value in sorted(found.items(), key=lambda item: (isinstance(item[1], str), item[1])):
        print(f"  {name:12}" + (f"{value:8.3f} ms" if isinstance(value, float) else f"  skipped: {value}"))


if __name__ == "__main__":
    main()
