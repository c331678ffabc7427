"""Which backend runs, and that one which cannot be imported keeps no other from running."""

import sys

import pytest
import torch

from vitkernels import attention, doctor
from vitkernels.attention import Problem, auto, contract
from vitkernels.errors import UsageError

PROBLEM = Problem(1, 2, 8, 8, 32, torch.float64, "cpu")


@pytest.fixture(params=["raise ImportError('no such symbol')", "1 / 0", "x = 1"], ids=["import", "code", "no BACKEND"])
def mine(request, monkeypatch, tmp_path):
    """A backend of the name "mine" whose module fails; the words for it."""
    (tmp_path / "mine.py").write_text(request.param)
    monkeypatch.setattr(attention, "__path__", [*attention.__path__, str(tmp_path)])
    monkeypatch.setitem(attention._MODULES, "mine", "vitkernels.attention.mine")
    monkeypatch.setattr(attention, "_broken", {})
    auto._chosen_before.cache_clear(), contract._runners.clear()
    yield "vitkernels.attention.mine cannot be imported: "
    auto._chosen_before.cache_clear(), contract._runners.clear()
    sys.modules.pop("vitkernels.attention.mine", None)
    vars(attention).pop("mine", None)


def test_the_doctor_names_a_broken_backend(mine, capsys):
    doctor.main()
    printed = capsys.readouterr().out
    assert f"attn=mine          cannot run: {mine}" in printed and "attn=native        runs\n" in printed


def test_a_refusal_lists_who_takes_the_model_without_a_broken_backend(mine):
    with pytest.raises(UsageError, match="these can: native, sdpa"):
        attention.choose_for_all("pallas_flash", [PROBLEM])


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_passes_over_a_broken_backend_and_says_why(mine, monkeypatch, caplog, compiled):
    monkeypatch.setitem(attention._PREFERENCE, "cpu", ("mine", "sdpa"))
    attend, x = attention.get("auto").__call__, torch.randn(1, 2, 8, 32)
    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="eager")
    with caplog.at_level("INFO"):
        assert torch.equal(attend(x, x, x), attention.get("sdpa")(x, x, x))
    assert "attn=auto chose sdpa" in caplog.text and f"not mine: {mine}" in caplog.text


def test_who_asks_for_a_broken_backend_gets_its_error(mine):
    with pytest.raises((ImportError, ZeroDivisionError, AttributeError)):
        attention.get("mine")


def test_an_unknown_name_is_answered_with_the_names():
    with pytest.raises(UsageError, match="Did you mean 'sdpa'"):
        attention.unsupported("sdp", PROBLEM)
