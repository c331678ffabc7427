"""Measure how training scales over the GPUs of one host, with DDP and FSDP on fake data, so input is not a bottleneck.

    python scripts/bench_scaling.py                                  ViT-B/16 at 256 px, batch 128 per GPU, 1 to 8 GPUs
    python scripts/bench_scaling.py --model vit_digits --classes 10 --batch 8 --steps 8 --warmup 6 --processes 1 2 \\
        --set runtime=cpu --attn sdpa --results /tmp/scaling.jsonl   anywhere, to try it out
    python scripts/bench_scaling.py --engines ddp fsdp,gather=bf16   with settings of conf/parallel; the default on GPUs
                                                                     is both gradient transports of ddp, and fsdp

Weak scaling: the batch per GPU stays the same. Efficiency is the median step of one GPU alone, without any strategy,
divided by that of N GPUs. All GPUs are also measured at the same time, each training alone: this shows how much they
compete for power and the host, and which GPU is the slowest, because the others would wait for it.
torchrun starts the processes once; processes that a run does not need wait. Rows are appended to
results/scaling.jsonl.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_b16_256", help="one of conf/model")
    parser.add_argument("--batch", type=int, default=128, help="images per GPU")
    parser.add_argument("--classes", type=int, default=1024)
    parser.add_argument("--attn", default="triton_flash")
    parser.add_argument("--processes", type=int, nargs="+", help="default: 1, 2, 4, 8, up to the number of GPUs")
    parser.add_argument("--engines", nargs="+", help="ddp or fsdp, and settings after a comma")
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--set", nargs="*", default=[], help="more settings of train.py")
    parser.add_argument("--results", type=Path, default=ROOT / "results/scaling.jsonl")
    args = parser.parse_args()
    on_cpu = "runtime=cpu" in args.set
    args.engines = args.engines or (["ddp", "fsdp"] if on_cpu else ["ddp,send=copy", "ddp,send=nccl", "fsdp"])
    gpus = torch.cuda.device_count()
    args.processes = args.processes or [count for count in (1, 2, 4, 8) if count <= gpus]
    if "RANK" in os.environ:
        from vitkernels.benchmarks import scaling

        scaling.run_all(args)
        return
    most = max(args.processes, default=1)
    if most == 1 or (not on_cpu and most > gpus):
        wanted = f"--processes {most}" if most > 1 else "2 or more"
        parser.error(
            f"this benchmark compares several GPUs ({wanted}), but PyTorch sees {gpus}. On CPUs, pass --processes 1 2 "
            "--set runtime=cpu and a small model, as in --help"
        )
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={most}"]
    threads = min(4, max(1, os.cpu_count() // most))  # torchrun's default of 1 slows down data and initialization
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
    sys.exit(subprocess.run([sys.executable, *torchrun, *sys.argv], env=environment).returncode)


if __name__ == "__main__":
    main()
