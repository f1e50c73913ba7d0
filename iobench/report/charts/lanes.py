"""Rows of a chart: each has its label above it on the left, and its figure on the right.

Labels above the rows need no margin, so that the same chart is readable on a phone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import altair as alt

from iobench.report.page.theme import INK, data_of

__all__ = ["BODY", "label_layers", "lane_axis", "lane_height", "lane_scale"]

_LANE = 52  # pixels
_LABEL = 0.24  # within a lane, from its top
BODY = 0.68
"""Where the marks of a lane are, from its top: row 0 has them at y = BODY."""


def lane_scale(lanes: int, head: float = 0.0) -> alt.Scale:
    """Return the scale of y, in lanes from the top, with room for `head` lanes above them."""
    return alt.Scale(domain=[-head, lanes], reverse=True, nice=False, zero=False)


def lane_axis(field: str, scale: alt.Scale) -> alt.Y:
    """Return the encoding of `field` in lanes; it has no axis, because lanes have labels."""
    return alt.Y(f"{field}:Q", scale=scale, axis=None)


def lane_height(lanes: int, head: float = 0.0) -> int:
    """Return the height in pixels."""
    return round(_LANE * (lanes + head))


def label_layers(labels: Sequence[tuple[str, str]], scale: alt.Scale) -> Iterator[alt.Chart]:
    """Yield the layers of the labels: the name and the figure of each lane."""
    texts = alt.Chart(
        data_of(
            {"y": position + _LABEL, "label": label, "figure": figure}
            for position, (label, figure) in enumerate(labels)
        )
    ).encode(y=lane_axis("y", scale))
    name = texts.mark_text(align="left", fontWeight=600, limit=290, color=INK)
    yield name.encode(text="label:N", x=alt.value(0))
    yield texts.mark_text(align="right", color=INK).encode(text="figure:N", x=alt.value("width"))
