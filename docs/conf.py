"""How Sphinx builds the manual; `make docs` runs it."""

from paceline import __version__

project = "Paceline"
author = "The Paceline authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"
smartquotes = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Links to pages beside the manual, such as the readme, stay plain text in it; the tidy tests follow every link.
suppress_warnings = ["myst.xref_missing"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = "Paceline"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_theme_options = {"light_css_variables": {"color-brand-primary": "#2b6cb0", "color-brand-content": "#2b6cb0"}}
