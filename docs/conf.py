"""Configuration of the documentation: Sphinx, MyST and furo. `make docs` builds it with warnings as errors."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import docs_reference  # noqa: E402
from reference_pages.api import to_rst  # noqa: E402

from vitkernels import __version__  # noqa: E402

project = "vitkernels"
author = "The vitkernels developers"
version = release = __version__
copyright = "the vitkernels developers, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence", "attrs_block"]
myst_heading_anchors = 3

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"vitkernels {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_theme_options = {"sidebar_hide_name": False}
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gp, .go"

# Pages that follow from the code are written before every build and are not committed.
docs_reference.write_pages(DOCS / "reference" / "generated")


def setup(app):
    app.connect("autodoc-process-docstring", to_rst, priority=100)  # before napoleon
