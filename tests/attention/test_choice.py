"""The choice of an attention backend; a broken backend does not stop the others."""

import sys
from dataclasses import replace

import pytest
import torch
from expecting import error

from vitkernels import attention
from vitkernels.attention import AttentionBackend, Problem, backends
from vitkernels.cli import doctor
from vitkernels.errors import UsageError
from vitkernels.registry.sources import Source

BROKEN = "broken_test"
PROBLEM = Problem(1, 2, 8, 8, 32, torch.float64, "cpu")


@pytest.fixture(params=["raise ImportError('no such symbol')", "1 / 0", "x = 1"], ids=["import", "code", "no BACKEND"])
def why(request, monkeypatch, tmp_path):
    """Yield the start of the refusal of a backend BROKEN, whose module fails to import."""
    (tmp_path / f"{BROKEN}.py").write_text(request.param)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(backends.OP._sources, BROKEN, Source(BROKEN))
    monkeypatch.setattr(backends.OP, "_failures", {})
    backends._forget_choices()
    yield f"{BROKEN} cannot be imported: "
    backends._forget_choices()


def test_get__names_the_attribute_that_an_entry_point_lacks(monkeypatch):
    monkeypatch.setitem(backends.OP._sources, BROKEN, Source("vitkernels.attention:NONE", "entry point of other 1.5"))
    monkeypatch.setattr(backends.OP, "_failures", {})
    with error("registry.no_attribute", attribute="NONE") as caught:
        attention.get(BROKEN)
    assert "other 1.5" in str(caught.value)


def test_doctor__names_a_broken_backend(why, capsys):
    doctor.main([])
    printed = capsys.readouterr().out
    assert f"attn={BROKEN:14}cannot run: {why}" in printed and "attn=native        runs\n" in printed


def test_choose_for_all__lists_the_backends_that_support_the_model(why):
    with error("attention.unsupported_model", backend="pallas_flash", others=["native", "sdpa"]) as caught:
        attention.choose_for_all("pallas_flash", [PROBLEM])
    assert caught.value.fields["reason"] == attention.unsupported("pallas_flash", PROBLEM)


def test_choose_for_all__refuses_a_backend_that_cannot_be_imported(why):
    with error("attention.unsupported_model", backend=BROKEN) as caught:
        attention.choose_for_all(BROKEN, [PROBLEM])
    assert caught.value.fields["reason"].startswith(why)


def test_choose_for_all_message__does_not_mention_the_command_line():
    with error("attention.unsupported_model") as caught:
        attention.choose_for_all("pallas_flash", [PROBLEM])
    reason = caught.value.fields["reason"]
    assert str(caught.value) == (
        f"attention backend 'pallas_flash' cannot run this model here: {reason}; these can: native, sdpa"
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_auto__passes_over_a_broken_backend_and_logs_why(why, monkeypatch, caplog, compiled):
    monkeypatch.setitem(backends.OP.auto, "cpu", (BROKEN, "sdpa"))
    attend, x = attention.get("auto").__call__, torch.randn(1, 2, 8, 32)
    if compiled:
        torch._dynamo.reset()  # drops the graphs of this test's other parameters
        attend = torch.compile(attend, fullgraph=True, backend="eager")
    with caplog.at_level("INFO"):
        assert torch.equal(attend(x, x, x), attention.get("sdpa")(x, x, x))
    assert "auto chose sdpa" in caplog.text and f"not {BROKEN}: {why}" in caplog.text


def test_choose__tries_a_slower_backend_last(monkeypatch):
    monkeypatch.setitem(backends.OP.auto, "cpu", ("native", "sdpa"))
    windows = Problem(8, 2, 49, 49, 32, torch.float32, "cpu", bias_shape=(1, 2, 49, 49))
    assert backends.choose(windows) == ("native", {})
    monkeypatch.setattr(type(attention.get("native")), "is_slower", lambda self, problem: problem.q_tokens == 49)
    assert backends.choose(windows) == ("sdpa", {})
    monkeypatch.setattr(type(attention.get("sdpa")), "refusal", lambda self, problem: "for the test")
    assert backends.choose(windows) == ("native", {"sdpa": "for the test"})


@pytest.mark.parametrize(
    "tokens, changes, expected",
    [
        (49, {"bias_shape": (1, 2, 49, 49)}, True),
        (49, {"has_segment_ids": True}, True),
        (49, {"has_segment_ids": True, "head_dim": 64}, False),
        (49, {"has_segment_ids": True, "head_dim": 64, "bias_shape": (1, 2, 49, 49)}, False),
        (49, {"head_dim": 72, "bias_shape": (1, 2, 49, 49)}, True),
        (49, {}, True),  # of head dim 32
        (50, {"head_dim": 64}, False),
        (65, {}, False),
        (197, {"bias_shape": (1, 2, 197, 197)}, False),
        (49, {"bias_shape": (1, 2, 49, 49), "device_type": "xla"}, False),
        (256, {"has_segment_ids": True}, True),
        (256, {"has_segment_ids": True, "head_dim": 64}, False),
        (257, {"has_segment_ids": True}, False),
        (196, {"has_segment_ids": True, "head_dim": 72}, False),
        (196, {"has_segment_ids": True, "is_causal": True}, False),
        (196, {"has_segment_ids": True, "has_mask": True}, False),
        (196, {"has_segment_ids": True, "has_rope": True}, False),
        (196, {"has_segment_ids": True, "bias_shape": (1, 2, 196, 196)}, False),
        (196, {"has_segment_ids": True, "device_type": "xla"}, False),
    ],
    ids=str,
)
def test_pallas_flash__is_slower_for_windows_and_short_segments_on_cuda(tokens, changes, expected):
    problem = replace(Problem(8, 2, tokens, tokens, 32, torch.bfloat16, "cuda"), **changes)
    assert attention.get("pallas_flash").is_slower(problem) is expected


def test_get__raises_the_import_error_of_a_broken_backend(why):
    with pytest.raises((ImportError, ZeroDivisionError, UsageError)):
        attention.get(BROKEN)


def test_get__finds_a_repaired_backend(why, tmp_path):
    assert attention.broken(BROKEN).startswith(why)
    (tmp_path / f"{BROKEN}.py").write_text("from vitkernels.attention.native import Native\nBACKEND = Native()\n#")
    sys.modules.pop(BROKEN, None)
    try:
        assert attention.get(BROKEN).name == "native" and attention.broken(BROKEN) is None
    finally:
        sys.modules.pop(BROKEN, None)
        vars(backends.OP._loaded).pop(BROKEN, None)


def test_unsupported__suggests_the_nearest_name():
    with error("unknown_name", name="sdp", near=["sdpa"]):
        attention.unsupported("sdp", PROBLEM)


def test_get__refuses_what_is_no_name():
    for name in (None, AttentionBackend):
        with error("unknown_name", name=name):
            attention.get(name)
