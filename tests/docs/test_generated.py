"""The parts of the documentation that come from the code and from results/ are complete and up to date."""

import re
import sys

import pytest
from docs_blocks import ROOT, pages

sys.path.insert(0, str(ROOT / "scripts"))

import docs_readme
from reference_pages import api, error_codes
from reference_pages import attention as attention_pages
from reference_pages import ops as ops_pages
from reference_pages import settings as settings_page

from vitkernels import attention, ops
from vitkernels.config import Config
from vitkernels.config.setting import groups_of, settings_of


def test_readme__has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_figures__are_up_to_date():
    assert docs_readme.outdated() == []


def test_outdated__names_a_page_whose_figure_was_edited(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    for page in docs_readme.PAGES:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text((ROOT / page).read_text())
    before, section = text.split("<!-- begin measured", 1)
    edited = re.sub(r"(\d+\.\d+) ms", lambda found: f"{float(found[1]) + 1} ms", section, count=1)
    (tmp_path / "README.md").write_text(f"{before}<!-- begin measured{edited}")
    monkeypatch.setattr(docs_readme, "ROOT", _Elsewhere(tmp_path))
    assert docs_readme.outdated() == ["README.md"]


class _Elsewhere:
    """Pages in one folder, results in the checkout."""

    def __init__(self, folder):
        self.folder = folder

    def __truediv__(self, path: str):
        return ROOT / path if path == "results" else self.folder / path


def test_chart__is_small():
    assert docs_readme.CHART.stat().st_size < 100_000


def test_configuration_page__has_every_setting():
    page = settings_page.configuration_page()
    for group, settings in {
        "": settings_of(Config),
        **{f"{n}.": settings_of(g) for n, g in groups_of(Config).items()},
    }.items():
        for each in settings:
            name = "..." if each.description.collects_rest else each.name
            assert f"| `{group}{name}` |" in page
    for path in (ROOT / "conf").glob("*/*.yaml"):
        if path.parent.name != "hydra":
            assert f"`{path.parent.name}={path.stem}`" in page


def test_attention_page__has_every_backend_and_the_hopper_kernels():
    rows = attention_pages.support_rows()
    assert {row[0].strip("`") for row in rows} == {name for name in attention.names() if name != "auto"}
    hopper = next(row for row in rows if row[1] == "NVIDIA Hopper")
    assert hopper[:4] == ("`pallas_flash`", "NVIDIA Hopper", "bf16, fp16", "32, 40, …, 128")


def test_ops_page__has_every_op():
    page = ops_pages.ops_page()
    for name in ops.__all__:
        if name[0].islower() and hasattr(sys.modules[getattr(ops, name).__module__], "BACKENDS"):
            assert f"## {name.removesuffix('_loss')}\n" in page


def test_error_codes__are_found():
    codes = error_codes.error_codes()
    assert {"attention.shape", "config.unknown", "registry.unsupported", "unknown_name"} <= set(codes)


def test_api_pages__are_listed_in_the_reference():
    listed = (ROOT / "docs/reference/index.md").read_text()
    for name in api.api_pages():
        assert f"generated/api_{name}\n" in listed


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links__lead_to_files(page):
    for target in re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if not target.startswith(("http", "mailto:")) and "generated" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.slow
def test_site__builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    import subprocess

    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-b",
        "html",
        "-W",
        "--keep-going",
        "-q",
        str(ROOT / "docs"),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
