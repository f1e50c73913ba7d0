"""One chart as a picture, SVG or PNG, drawn by vl-convert without a browser."""

from __future__ import annotations

import copy
import textwrap
from typing import Any

import vl_convert

from iobench.report.document import Chart
from iobench.report.page.bundle import inline_json, vega_lite_version
from iobench.report.page.theme import MUTED, PAPER

__all__ = ["draw"]

_WIDTH = 760
_TITLE_COLUMNS, _CAPTION_COLUMNS = 84, 118
_PNG_SCALE = 2  # for slides and dense screens


def draw(chart: Chart, form: str) -> bytes:
    """Return the picture of `chart` on white, with its title. `form` is `svg` or `png`."""
    spec = inline_json(_standing_alone(chart))
    version = vega_lite_version()
    if form == "png":
        return bytes(vl_convert.vegalite_to_png(spec, vl_version=version, scale=_PNG_SCALE))
    return str(vl_convert.vegalite_to_svg(spec, vl_version=version)).encode()


def _standing_alone(chart: Chart) -> dict[str, Any]:
    spec = copy.deepcopy(dict(chart.spec))
    spec["width"] = _WIDTH
    spec["background"] = PAPER
    spec["padding"] = 20
    spec["title"] = {
        "text": textwrap.wrap(chart.headline or chart.title, _TITLE_COLUMNS),
        "subtitle": textwrap.wrap(chart.caption, _CAPTION_COLUMNS),
        "subtitleColor": MUTED,
        "subtitlePadding": 6,
        "offset": 14,
    }
    return spec
