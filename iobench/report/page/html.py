"""A page as one self-contained HTML file, by Jinja2 with autoescaping.

No text of a record is trusted: it is escaped, and a content security policy allows only the two
scripts of the page, by their hashes, and no request to any host.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import textwrap
from functools import cache
from importlib.resources import files
from itertools import count

import altair as alt
import jinja2
import vl_convert
from markupsafe import Markup, escape

from iobench._version import __version__
from iobench.report.document import Chart, Document
from iobench.report.page.theme import DARK, MUTED, PAPER, SCHEME
from iobench.text import printable

_SNIPPET = "window.vegaEmbed = vegaEmbed;"


def vega_lite_version() -> str:
    """Return the version of Vega-Lite whose specs altair makes, as vl-convert takes it: `6.1`."""
    return ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


@cache
def runtime() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script for `inline_script`."""
    return inline_script(vl_convert.javascript_bundle(_SNIPPET, vl_version=vega_lite_version()))


def inline_script(source: str) -> str:
    """Return `source` so that no text in it ends, or hides the end of, its script element."""
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def content_hash(script: str) -> str:
    """Return the source by which a content security policy allows exactly this script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


GENERATOR = "iobench show"
"""The `generator` of every page, near its begin: marks files that a newer report may replace."""
_LONGEST_OPTION = 30
_STYLE_CLASSES = {"green": "good", "yellow": "scaled", "bold red": "bad"}
"""Classes of page.css for the styles of a Grid."""


def html(document: Document) -> str:
    """Return the page of `document`."""
    own = inline_script(_template("page.js"))
    styles = _environment().get_template("page.css.j2")
    scripts = [runtime(), own] if document.charts else [own]
    numbers = count(1)
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            page=document,
            generator=f"{GENERATOR} {__version__}",
            version=__version__,
            scripts=[Markup(one) for one in scripts],  # ours, not the record's
            policy=Markup(" ".join(map(content_hash, scripts))),
            style=Markup(styles.render(scheme=SCHEME, dark=DARK)),
            scheme=SCHEME,
            next_id=lambda: next(numbers),
            files=[(printable(path.name), path.read_bytes()) for path in document.records],
            packed=_packed,
        )
    )


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("iobench.report.page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters["whole_options"] = _whole_options
    environment.filters["breakable"] = _breakable
    environment.filters["style_class"] = lambda style: _STYLE_CLASSES.get(style, "")
    return environment


def _whole_options(text: str) -> Markup:
    """Return `text` escaped; no line ends within an option such as `-o`."""
    return Markup(" ").join(
        Markup('<span class="whole">{}</span>').format(word)
        if word.startswith("-") and len(word) <= _LONGEST_OPTION
        else escape(word)
        for word in text.split(" ")
    )


def _breakable(text: str) -> Markup:
    """Return `text` escaped; a line may end after a comma, as in `hybrid,block_size=4MiB`.

    Not after that of a number: 1,000.
    """
    return Markup(",<wbr>").join(map(escape, re.split(r",(?=[^\d\s])", text)))


def _packed(data: bytes) -> str:
    """Return the file for the page: gzip in base64. The same file gives the same text."""
    return base64.b64encode(gzip.compress(data, mtime=0)).decode()


def _template(name: str) -> str:
    return files("iobench.report.page").joinpath("templates", name).read_text(encoding="utf-8")


_WIDTH = 760
_TITLE_COLUMNS, _CAPTION_COLUMNS = 84, 118
_PNG_SCALE = 2  # for slides and dense screens


def draw(chart: Chart, form: str) -> bytes:
    """Return the picture of `chart` on white, with its title. `form` is `svg` or `png`."""
    title = {
        "text": textwrap.wrap(chart.headline or chart.title, _TITLE_COLUMNS),
        "subtitle": textwrap.wrap(chart.caption, _CAPTION_COLUMNS),
        "subtitleColor": MUTED,
        "subtitlePadding": 6,
        "offset": 14,
    }
    alone = {"width": _WIDTH, "background": PAPER, "padding": 20, "title": title}
    spec, version = json.dumps({**chart.spec, **alone}), vega_lite_version()
    if form == "png":
        return bytes(vl_convert.vegalite_to_png(spec, vl_version=version, scale=_PNG_SCALE))
    return str(vl_convert.vegalite_to_svg(spec, vl_version=version)).encode()
