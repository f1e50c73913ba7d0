"""A page as one self-contained HTML file, by Jinja2 with autoescaping.

No text of a record is trusted: it is escaped, and a content security policy allows only the two
scripts of the page, by their hashes, and no request to any host.
"""

from __future__ import annotations

import base64
import gzip
from functools import cache
from importlib.resources import files
from itertools import count

import jinja2
from markupsafe import Markup, escape

from iobench._version import __version__
from iobench.report.document import Document
from iobench.report.page.bundle import content_hash, inline_json, inline_script, runtime
from iobench.report.page.theme import SCHEME
from iobench.text import printable

__all__ = ["GENERATOR", "html"]

GENERATOR = "iobench report"
"""The `generator` of every page, near its begin: marks files that a newer report may replace."""
_LONGEST_OPTION = 30
_STYLE_CLASSES = {"green": "good", "yellow": "scaled", "bold red": "bad"}
"""Classes of page.css for the styles of a Grid."""


def html(document: Document) -> str:
    """Return the page of `document`."""
    library, own = runtime(), inline_script(_template("page.js"))
    numbers = count(1)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=document,
            generator=f"{GENERATOR} {__version__}",
            scripts=[Markup(one) for one in (library, own)],  # ours, not the record's
            policy=Markup(" ".join(map(content_hash, (library, own)))),
            style=Markup(_style()),
            scheme=SCHEME,
            next_id=lambda: next(numbers),
            files=[(printable(path.name), path.read_bytes()) for path in document.records],
            packed=_packed,
        )
    )


def _style() -> str:
    return _environment().get_template("page.css.j2").render(scheme=SCHEME)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("iobench.report.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline_json"] = lambda value: Markup(inline_json(value))
    environment.filters["whole_options"] = _whole_options
    environment.filters["style_class"] = lambda style: _STYLE_CLASSES.get(style, "")
    return environment


def _whole_options(text: str) -> Markup:
    """Return `text` escaped; no line ends within an option such as `--repeat`."""
    return Markup(" ").join(
        Markup('<span class="whole">{}</span>').format(word)
        if word.startswith("--") and len(word) <= _LONGEST_OPTION
        else escape(word)
        for word in text.split(" ")
    )


def _packed(data: bytes) -> str:
    """Return the file for the page: gzip in base64. The same file gives the same text."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _template(name: str) -> str:
    return files("iobench.report.page").joinpath("templates", name).read_text(encoding="utf-8")
