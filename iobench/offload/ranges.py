"""Ranges of the flat parameters, one for each rank (ZeRO stage 1)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from iobench.offload.layout import ALIGN

__all__ = ["ParameterRange", "range_name", "ranges_of", "whole_name"]

_RANGE = re.compile(r"\[\d+:\d+\]$")


class ParameterRange(NamedTuple):
    """A part of one parameter, in elements of the flat parameter."""

    parameter: int
    begin: int
    end: int


def ranges_of(elements: Sequence[int], ranks: int) -> list[list[ParameterRange]]:
    """Return the ranges of each rank: all elements once, in order, in nearly equal shares.

    `elements` has the size of each parameter. A range begins at a multiple of ALIGN of its
    parameter, so that its update has the same bits as that of the whole parameter.
    """
    units = [-(-count // ALIGN) for count in elements]
    whole = sum(units)
    found: list[list[ParameterRange]] = []
    for rank in range(ranks):
        first, last = whole * rank // ranks, whole * (rank + 1) // ranks
        own, start = [], 0
        for index, count in enumerate(units):
            begin, end = max(first - start, 0), min(last - start, count)
            if begin < end:
                stop = min(end * ALIGN, elements[index])
                own.append(ParameterRange(index, begin * ALIGN, stop))
            start += count
        found.append(own)
    return found


def range_name(name: str, one: ParameterRange) -> str:
    """Return the name of a range of the parameter `name`."""
    return f"{name}[{one.begin}:{one.end}]"


def whole_name(name: str) -> str:
    """Return the name of the parameter of a range, or `name` if it is that of a whole one."""
    return _RANGE.sub("", name)
