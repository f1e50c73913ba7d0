"""Colours that everybody can tell from the background, and that stay the same."""

from __future__ import annotations

import pytest

from iobench import peers
from iobench.report import palette
from iobench.report.page.theme import DARK, INK, MUTED, PAPER
from iobench.report.palette import colour_of, shape_of
from iobench.writers import registry

_DARK = DARK["paper"]
_LEAST = 3.0  # WCAG 2.2, 1.4.11


def _light(colour: str) -> float:
    """Relative luminance, WCAG 2.2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    high, low = sorted((_light(one), _light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _names() -> list[str]:
    others = [f"writer-{number}" for number in range(20)]
    return [*registry.names(), *(f"peer:{name}" for name in (*peers.names(), *others)), *others]


def test_contrast() -> None:
    """On paper and in the dark, for writers and peers."""
    colours = [*map(colour_of, _names())]
    faint = [c for c in colours if min(_contrast(c, PAPER), _contrast(c, _DARK)) < _LEAST]
    assert not faint
    assert min(_contrast(INK, PAPER), _contrast(MUTED, PAPER)) >= 4.5


@pytest.mark.parametrize(
    "kinds",
    [
        ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
        ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    ],
    ids=["deuteranopia", "protanopia"],
)
def test_the_usual_writers_differ_for_the_colour_blind(
    kinds: tuple[tuple[float, ...], ...],
) -> None:
    """Those of most runs, by distance of what is seen (matrices: Machado 2009, severity 1)."""
    usual = ("buffered", "uncached", "odirect", "uring", "hybrid", "peer:torch-save")
    seen = []
    for name in usual:
        rgb = [int(colour_of(name)[at : at + 2], 16) for at in (1, 3, 5)]
        seen.append([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in kinds])
    for number, one in enumerate(seen):
        for other in seen[:number]:
            assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 20


def test_each_writer_and_peer_has_its_own() -> None:
    """Peers have another shape too; unknown names have always the same colour."""
    own = [colour_of(name) for name in registry.names()]
    own += [colour_of(f"peer:{name}") for name in peers.names()]
    assert len({*own}) == len(own) > 15
    assert {shape_of(name) for name in registry.names()} == {palette.CIRCLE}
    assert {shape_of(f"peer:{name}") for name in peers.names()} == {palette.DIAMOND}
    assert colour_of("somebody's") == "#14958a"
    assert colour_of("peer:\ud800").startswith("#")
