"""Places of the labels of points, where they hide neither each other nor a point."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["HEIGHT", "WIDTH", "LabelBox", "Place", "meet", "placed"]

HEIGHT = 300
"""Of the chart, in pixels."""
WIDTH = 760
"""For the labels: a wider chart has more room for them, a phone less."""
_LETTER, _LINE, _GAP = 7.0, 15, 9  # pixels
_FAR = 0.6 * WIDTH
_FARTHEST = 180  # pixels from a point to its label: many writers may cost the same

LabelBox = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


@dataclass(frozen=True)
class Place:
    """The place of a label: its alignment, and its offset from the point in pixels."""

    align: str
    dx: int
    dy: int

    @property
    def apart(self) -> bool:
        """Whether the label is so far from its point that a line must lead to it."""
        return abs(self.dx) > _GAP

    def box(self, x: float, y: float, width: float) -> LabelBox:
        """Return left, top, right and bottom of a label of `width` pixels at a point."""
        left = {"left": 0.0, "right": -width, "center": -width / 2}[self.align] + x + self.dx
        return left, y + self.dy - _LINE / 2, left + width, y + self.dy + _LINE / 2


_PLACES = (
    Place("left", _GAP, 0),
    Place("right", -_GAP, 0),
    Place("center", 0, -_GAP - 6),
    Place("center", 0, _GAP + 7),
    Place("left", _GAP, -_LINE),
    Place("left", _GAP, _LINE),
    Place("right", -_GAP, -_LINE),
    Place("right", -_GAP, _LINE),
    *(
        Place(align, dx, dy)
        for further in range(_LINE + 10, _FARTHEST, 5)
        for dy in (further, -further)
        for align, dx in (("left", 3 * _GAP), ("right", -3 * _GAP))
    ),
)
"""The first ones are next to the point. A line leads from the point to each further one."""


def placed(points: Sequence[tuple[float, float, str]]) -> Iterator[Place]:
    """Yield the place of each label: the first one that hides no other label and no point.

    `points` are parts of width and height, from the top left.
    """
    at = [(x * WIDTH, y * HEIGHT) for x, y, _ in points]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in at]
    for number, (x, y) in enumerate(at):
        width = _LETTER * len(points[number][2])
        others = [box for position, box in enumerate(taken) if position != number]
        # To the left where a narrow chart would have no room to the right.
        places = sorted(_PLACES, key=lambda one: one.align == "left") if x > _FAR else _PLACES
        free = (
            label
            for label in places
            if _inside(box := label.box(x, y, width)) and not any(meet(box, one) for one in others)
        )
        label = next(free, places[0])
        taken.append(label.box(x, y, width))
        yield label


def _inside(box: LabelBox) -> bool:
    return box[0] >= 0 and box[2] <= WIDTH and box[1] >= 0 and box[3] <= HEIGHT


def meet(one: LabelBox, other: LabelBox) -> bool:
    """Whether two boxes overlap."""
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
