"""Puts the page together from the files in `page`: one text that loads nothing but its own stream of events."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec

_FOLDER: Final = Path(__file__).with_name("page")
_STYLES: Final = ("uPlot.min.css", "style.css")
_SCRIPTS: Final = ("uPlot.iife.min.js", "charts.js", "dashboard.js")


class Page(msgspec.Struct, frozen=True):
    """The page as bytes, and the policy by which a browser runs what is in it, and nothing else."""

    content: bytes
    policy: str


def read_page() -> Page:
    """Return the page; raises OSError if files of the installation are missing."""
    styles = [_read(name) for name in _STYLES]
    scripts = [_read(name) for name in _SCRIPTS]
    text = _read("index.html")
    text = text.replace("<!-- styles -->", "".join(f"<style>{style}</style>\n" for style in styles))
    text = text.replace("<!-- scripts -->", "".join(f"<script>{script}</script>\n" for script in scripts))
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(text.encode(), policy)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
