"""Parts of a checkpoint: some tensors chosen at random, or what a tensor parallel rank reads.

A part is a number: below 1 the share of the bytes of whole tensors, and above 1 the ranks of tensor
parallelism.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from iobench.errors import OptionError
from iobench.workloads.specs import TensorSpec
from iobench.writers.image import FileImage, Segment

_SAME = "same"
_KIND, _TP = "subset", "tp"
_MOST_RANKS = 1024


def parse(text: str) -> float | None:
    """Return 0.1 for `subset=0.1`, 8 for `tp=8`, None (all) for `same`. Raises OptionError."""
    kind, _, given = text.partition("=")
    if text == _SAME:
        return None
    if kind == _TP and given.isdecimal() and 2 <= int(given) <= _MOST_RANKS:
        return int(given)
    try:
        part = float(given) if kind == _KIND else 0.0
    except ValueError:
        part = 0.0
    if not 0 < part < 1:
        raise OptionError(
            f"--restore-as {text}: must be same, or subset=PART with a part between 0 and 1, or "
            f"tp=RANKS with 2 to {_MOST_RANKS} ranks"
        )
    return part


def text_of(part: float) -> str:
    """Return the text that `parse` accepts, such as `subset=0.1`."""
    return f"{_KIND if ranks_of(part) is None else _TP}={part:g}"


def ranks_of(part: float | None) -> int | None:
    """Return the ranks of tensor parallelism; None for another part."""
    return int(part) if part is not None and part > 1 else None


def share_of(part: float | None) -> float:
    """Return about how much of the bytes a restore moves."""
    ranks = ranks_of(part)
    return 1 / ranks if ranks is not None else part or 1.0


def cut_of(spec: TensorSpec, rank: int, ranks: int) -> tuple[slice, ...]:
    """Return the slice of a tensor that `rank` of tensor parallel `ranks` loads; () for all."""
    if spec.split is None:
        return ()
    length = spec.shape[spec.split]
    own = slice(rank * length // ranks, (rank + 1) * length // ranks)
    return (*(slice(None),) * spec.split, own)


def choose(sizes: Sequence[int], part: float, seed: int) -> bytearray:
    """Choose random tensors until they have `part` of all bytes; at least one is not empty.

    `sizes` are the bytes of each tensor. Returns a byte for each of them: 1 for the chosen ones.
    """
    chosen = bytearray(len(sizes))
    least = part * sum(sizes)
    size = 0
    for position in np.random.default_rng(seed).permutation(len(sizes)):
        if size and size >= least:
            break
        chosen[position] = 1
        size += sizes[position]
    return chosen


def ranges_of(image: FileImage, tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the ranges of the file that hold `tensors`, parts of the image's memory, in order."""
    placed = [(_address(segment.memory), segment) for segment in image.segments]
    starts = sorted(placed, key=lambda entry: entry[0])
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(_place(tensor, starts) for tensor in tensors if tensor.nbytes):
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, stop))
    return ranges


def _place(tensor: torch.Tensor, starts: Sequence[tuple[int, Segment]]) -> tuple[int, int]:
    index = bisect.bisect_right(starts, tensor.data_ptr(), key=lambda entry: entry[0]) - 1
    address, segment = starts[index]
    start = segment.offset + tensor.data_ptr() - address
    return start, start + tensor.nbytes


def _address(memory: Any) -> int:
    return int(np.asarray(memory).ctypes.data)
