"""When ddp uses the copy engines: send="auto", unsupported models, machines and settings."""

import os
import re
import time
from unittest import mock

import torch
from copying import create_ddp
from expecting import error
from ranks import Ranks
from torch import nn

from vitkernels import parallel
from vitkernels.parallel import copy_engine, ddp, host_memory
from vitkernels.runtime.base import Runtime


def wrap_unsupported_models():
    with create_ddp(0) as engine:
        with error("parallel.send", send="copy") as refused:
            engine.wrap(nn.Linear(2, 2).double())
        assert "torch.float64" in refused.value.fields["reason"]
        mock.patch.object(copy_engine, "can_send_between_cuda_graphs", lambda: False).start()
        with error("parallel.send", send="copy") as refused:
            engine.wrap(nn.Linear(2, 2), True, "reduce-overhead")
        assert "CUDA graphs" in refused.value.fields["reason"]


def test_send_copy__refuses_unsupported_models(tmp_path):
    ranks = Ranks.of(1, tmp_path / "log", wrap_unsupported_models)
    assert ranks.finish() == [0], ranks.output()


def choose_automatically():
    """send="auto" on ranks that could copy, except in the last case, where one cannot."""
    model, device = nn.Linear(2, 2), mock.Mock(total_memory=2**20)
    mock.patch.object(torch.cuda, "get_device_properties", lambda _: device).start()
    info = mock.patch.object(ddp.log, "info").start()
    cases = [(True, None, "copy engines"), (False, None, "nccl, .*compiled")]
    mock.patch.object(copy_engine, "can_send_between_cuda_graphs", lambda: True).start()
    cases += [(True, "reduce-overhead", "copy engines")]
    with create_ddp(0) as engine:
        engine.send = "auto"
        engine.accum_steps = 2
        assert not engine._uses_copy_engine(model, True, None) and "accum_steps=2" in info.call_args.args[1]
        engine.accum_steps = 1
        for compiled, mode, expected in cases:
            assert engine._uses_copy_engine(model, compiled, mode) == expected.startswith("copy")
            assert re.match(expected, info.call_args.args[1])
        engine.world = 3
        assert not engine._uses_copy_engine(model, True, None) and "2 GPUs, not on 3" in info.call_args.args[1]
        engine.world = 2
        model.weights_in_float32 = True
        assert not engine._uses_copy_engine(model, True, None) and "float32 gradients" in info.call_args.args[1]
        assert engine._uses_copy_engine(model, True, "reduce-overhead")
        mock.patch.object(copy_engine, "can_send_between_cuda_graphs", lambda: False).start()
        assert not engine._uses_copy_engine(model, True, "reduce-overhead") and "torch 2.11" in info.call_args.args[1]
        model.weights_in_float32 = False
        device.total_memory = 900  # 5 % of it is 45; the received gradients take 48
        assert not engine._uses_copy_engine(model, True, None)
        assert "nccl" in info.call_args.args[1] and "GiB of each GPU's memory" in info.call_args.args[1]
    mock.patch.object(host_memory, "unavailable", lambda rank, *_: "as it were" if rank == 1 else None).start()
    with error("parallel.send", send="copy", reason="as it were"):
        create_ddp(1)


def test_send_auto__copies_only_where_measured_faster(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", choose_automatically)
    assert ranks.finish() == [0, 0], ranks.output()


def find_no_memory_and_exit_late():
    mock.patch.object(host_memory, "unavailable", lambda rank, *_: "as it were").start()
    with error("parallel.send", reason="as it were"):
        create_ddp(0)
    time.sleep(3 * int(os.environ["RANK"]))


def test_unavailable_copy_engine__raises_the_same_error_on_all_ranks(tmp_path):
    ranks = Ranks.of(2, tmp_path / "log", find_no_memory_and_exit_late)
    assert ranks.finish() == [0, 0], f"a rank that exited later counted the others as lost: {ranks.output()}"


def test_send__refuses_unsupported_configurations(monkeypatch):
    with error("unknown_name", name="copies", choices=["auto", "copy", "nccl"]):
        parallel.create("ddp", Runtime(), send="copies")
    for name in ("none", "fsdp"):
        with error("parallel.setting", setting="send", strategy=name):
            parallel.create(name, Runtime(), send="copy")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with error("parallel.send", send="copy"):
        parallel.create("ddp", Runtime(), send="copy")
    with error("parallel.send", send="nccl"):
        parallel.create("ddp", Runtime(), send="nccl")


def test_unsupported__several_hosts_or_reduced_precision(monkeypatch):
    gpu = torch.device("cuda", 0)
    assert copy_engine.unsupported(gpu, 2, torch.float32) is None
    assert "float32" in copy_engine.unsupported(gpu, 2, torch.bfloat16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert "one host" in copy_engine.unsupported(gpu, 4, torch.float32)
