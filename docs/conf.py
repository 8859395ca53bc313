"""Settings of the documentation site; `make docs` builds it into docs/_build/html."""

from __future__ import annotations

import paceline

project = "Paceline"
copyright = "the authors of Paceline"  # noqa: A001 - the name that Sphinx reads
version = release = paceline.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Paceline {version}"
html_static_path: list[str] = []
html_show_sphinx = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False
default_role = "code"  # single backticks in docstrings
napoleon_use_ivar = True
copybutton_prompt_text = "$ "
