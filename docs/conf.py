"""The documentation site: `make docs` builds it from the Markdown files, and from the docstrings of public names.

The repository is the source folder, so that links between pages lead to the same files in it and on the site.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))

project = "rankwise"
author = "The rankwise developers"
copyright = author  # noqa: A001 - Sphinx reads this name
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**"]
exclude_patterns = ["build", "dist", "benchmarks", "examples", "src", "tests", "tools", ".*"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_click",
    "site_parts",
]
nitpicky = True

myst_heading_anchors = 4  # as in a repository browser
myst_enable_extensions = ["colon_fence"]

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_preprocess_types = False
napoleon_use_ivar = True  # attributes are in the list of members
smartquotes = False  # options begin with --

# Plain text, trimmed by tools/inventories.py: no network is used here.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(ROOT / "docs" / "inventories" / "python.inv")),
    "torch": ("https://docs.pytorch.org/docs/stable", str(ROOT / "docs" / "inventories" / "torch.inv")),
}

html_theme = "furo"
html_title = "rankwise"
html_copy_source = True  # of which llms.txt lists the files
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"
