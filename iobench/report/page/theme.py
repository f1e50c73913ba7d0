"""The look of all charts, and the Vega-Lite spec of one.

Charts are drawn in the colours of paper. In a page, page.css replaces INK, MUTED, GRID and PAPER
by those of its own scheme, so that light, dark and printed pages need no second drawing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt

INK, MUTED, GRID, PAPER = "#1c2026", "#5a6270", "#e3e6eb", "#ffffff"
SCHEME = {"ink": INK, "muted": MUTED, "grid": GRID, "paper": PAPER}
DARK = {"ink": "#e7eaee", "muted": "#a0a8b4", "grid": "#2d333c", "paper": "#191d23"}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_CONFIG = {
    "font": _FONT,
    "aria": False,  # the page describes each chart as one image
    "background": None,
    "padding": {"left": 2, "right": 8, "top": 4, "bottom": 4},
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "gridColor": GRID,
        "domain": False,
        "ticks": False,
        "labelPadding": 6,
        "labelOverlap": True,
        "labelSeparation": 6,
    },
    "legend": {
        "orient": "top",
        "direction": "horizontal",
        "title": None,
        "labelColor": INK,
        "labelFontSize": 12,
        "labelLimit": 170,
        "symbolSize": 110,
        "symbolOpacity": 1,
        "symbolStrokeWidth": 2,
        "columns": {"expr": "max(1, floor(width / 190))"},  # a phone has room for two
        "offset": 8,
    },
    "title": {"color": INK, "subtitleColor": MUTED, "anchor": "start", "fontSize": 16},
    "text": {"color": INK, "fontSize": 13},
    "range": {"category": ["#2b7bd0", "#d5622a", "#2f9a4b", "#8a5fd3", "#14958a", "#c4568f"]},
}


def data_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `rows` as data of a chart, each with the fields that its encodings name.

    Altair copies a list, and checks each value of an InlineData, at every step that a chart is
    made in: with 20 repetitions of 12 writers that takes most of the time. It keeps a tuple.
    """
    return {"values": tuple(dict(row) for row in rows)}


def spec_of(chart: alt.Chart | alt.LayerChart | alt.FacetChart, height: int) -> dict[str, Any]:
    """Return the Vega-Lite spec of a chart `height` pixels high and as wide as its container."""
    sized = chart.properties(width="container", height=height)
    spec: dict[str, Any] = sized.to_dict(validate=False)
    spec["datasets"] = {name: list(rows) for name, rows in spec["datasets"].items()}
    spec["config"] = _CONFIG
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec
