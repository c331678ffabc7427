"""Mistakes in another package's attention backend: what each says, and that it names the backend."""

import logging

import pytest
import torch
from expecting import error

from vitkernels import attention
from vitkernels.attention import AttentionBackend
from vitkernels.attention.native import Native
from vitkernels.cli.exit_status import errors_as_exit_status


class Transposed(Native):
    name = "transposed"

    def run(self, *args, **keywords):
        return super().run(*args, **keywords).transpose(1, 2)


class Rounded(Native):
    name = "rounded"

    def run(self, *args, **keywords):
        return super().run(*args, **keywords).bfloat16()


class Silent(AttentionBackend):
    name = "silent"

    def run(self, *args, **keywords):
        pass


class Packed(Native):
    name = "packed"

    def run_qkvpacked(self, qkv_BN3HD, **keywords):
        return super().run_qkvpacked(qkv_BN3HD, **keywords).unflatten(-1, (2, -1))


class Failing(AttentionBackend):
    name = "failing"

    def run(self, q, k, v):  # accepts no keywords
        return v


class WithOptions(Native):
    name = "with_options"

    def configured(self, block: int = 64):
        self.block = block
        return self


@pytest.mark.parametrize("backend", [Transposed(), Rounded(), Silent(), Packed()], ids=lambda backend: backend.name)
def test_wrong_result__names_the_backend_and_what_it_must_return(backend):
    qkv = torch.randn(2, 17, 3, 4, 32)
    with error("attention.result", backend=backend.name) as caught:
        backend.qkvpacked(qkv)
    assert "must return" in str(caught.value) and __name__ in str(caught.value)
    if backend.name != "packed":
        with error("attention.result", backend=backend.name) as caught:
            backend(*qkv.permute(2, 0, 3, 1, 4))
        assert "(2, 4, 17, 32) in torch.float32 from run" in str(caught.value)


def test_checked_result__compiles():
    class Mine(Native):
        name = "mine"

    x = torch.randn(1, 2, 8, 32)
    compiled = torch.compile(lambda x: Mine()(x, x, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), attention.get("native")(x, x, x))


@pytest.mark.parametrize("named", [True, False], ids=["backend", "this package"])
def test_internal_error__names_the_backend_that_failed(named, caplog):
    x = torch.randn(1, 2, 8, 32)
    with caplog.at_level(logging.ERROR), pytest.raises(SystemExit, match="1"), errors_as_exit_status():
        if named:
            Failing()(x, x, x)
        raise RuntimeError("elsewhere")
    expected = f"attention backend 'failing' of {__name__} failed" if named else "internal error (please report it)"
    assert caplog.messages == [expected]


def test_options__are_those_of_configured():
    attention.register("with_options", WithOptions())
    try:
        assert attention.configured("with_options", {"block": 32}).block == 32
        with error("attention.options", backend="with_options", options=("bock",)):
            attention.configured("with_options", {"bock": 3})
        with error("attention.options", options=("block",)):
            attention.configured("sdpa", {"block": 3})
        with error("registry.name_clash") as caught:
            attention.register("with_options", WithOptions())
        assert "unregister('with_options')" in str(caught.value)
    finally:
        attention.unregister("with_options")
