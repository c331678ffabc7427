"""Which backend runs, and that one which cannot be imported keeps no other from running."""

import sys

import pytest
import torch

from vitkernels import attention
from vitkernels.attention import Problem, auto, contract
from vitkernels.cli import doctor
from vitkernels.errors import UsageError

BROKEN = "broken_test"  # not the README's example: a backend of that name is somebody's own
PROBLEM = Problem(1, 2, 8, 8, 32, torch.float64, "cpu")


@pytest.fixture(params=["raise ImportError('no such symbol')", "1 / 0", "x = 1"], ids=["import", "code", "no BACKEND"])
def why(request, monkeypatch, tmp_path):
    """The words for a backend BROKEN whose module fails."""
    (tmp_path / f"{BROKEN}.py").write_text(request.param)
    monkeypatch.setattr(attention, "__path__", [*attention.__path__, str(tmp_path)])
    monkeypatch.setitem(attention._MODULES, BROKEN, f"vitkernels.attention.{BROKEN}")
    monkeypatch.setattr(attention, "_broken", {})
    auto._chosen_before.cache_clear(), contract._runners.clear()
    yield f"vitkernels.attention.{BROKEN} cannot be imported: "
    auto._chosen_before.cache_clear(), contract._runners.clear()
    sys.modules.pop(f"vitkernels.attention.{BROKEN}", None)
    vars(attention).pop(BROKEN, None)


def test_the_doctor_names_a_broken_backend(why, capsys):
    doctor.main()
    printed = capsys.readouterr().out
    assert f"attn={BROKEN:14}cannot run: {why}" in printed and "attn=native        runs\n" in printed


def test_a_refusal_lists_who_takes_the_model_without_a_broken_backend(why):
    with pytest.raises(UsageError, match="these can: native, sdpa"):
        attention.choose_for_all("pallas_flash", [PROBLEM])


@pytest.mark.parametrize("compiled", [False, True])
def test_auto_passes_over_a_broken_backend_and_says_why(why, monkeypatch, caplog, compiled):
    monkeypatch.setitem(attention._PREFERENCE, "cpu", (BROKEN, "sdpa"))
    attend, x = attention.get("auto").__call__, torch.randn(1, 2, 8, 32)
    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="eager")
    with caplog.at_level("INFO"):
        assert torch.equal(attend(x, x, x), attention.get("sdpa")(x, x, x))
    assert "attn=auto chose sdpa" in caplog.text and f"not {BROKEN}: {why}" in caplog.text


def test_who_asks_for_a_broken_backend_gets_its_error(why):
    with pytest.raises((ImportError, ZeroDivisionError, AttributeError)):
        attention.get(BROKEN)


def test_an_unknown_name_is_answered_with_the_names():
    with pytest.raises(UsageError, match="Did you mean 'sdpa'"):
        attention.unsupported("sdp", PROBLEM)
