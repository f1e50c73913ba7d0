"""The settings of a target, and their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.errors import UnavailableError, UnknownNameError
from iobench.tune.space import Candidate, Dimension, space_of
from iobench.writers.registry import make
from iobench.writers.s3 import S3Writer


def test_the_space_of_a_directory(tmp_path: Path) -> None:
    """All writers that work there and store bytes, the default first; the others with reasons."""
    space = space_of(str(tmp_path))
    assert space.baseline.label == space.known[0].label == "hybrid"
    assert {"buffered", "uncached", "hybrid"} <= set(space.dimensions)
    assert not {"null", "s3"} & set(space.dimensions)
    assert all("gds" in line or "is not available here" in line for line in space.left_out)
    labels = [one.label for one in space.known]
    assert len(set(labels)) == len(labels)
    assert set(space.dimensions) == {one.writer for one in space.known}
    assert space.size == sum(space.size_of(name) for name in space.dimensions)


def test_every_value_is_one_that_the_writer_takes(tmp_path: Path) -> None:
    """Search ranges are within the allowed ranges, and contain the defaults."""
    space = space_of(str(tmp_path))
    for name, dimensions in space.dimensions.items():
        for one in dimensions:
            assert make(name).options.to_dict()[one.option] in one.values
            for value in one.values:
                assert make(name, **{one.option: value}).options.to_dict()[one.option] == value


def test_only_those_asked_for(tmp_path: Path) -> None:
    """Where `hybrid` is not one of them, the default of another one is the baseline."""
    space = space_of(str(tmp_path), ["hybrid"])
    assert set(space.dimensions) == {"hybrid"}
    assert space.baseline == Candidate.of("hybrid", {}, "baseline")
    space = space_of(str(tmp_path), ["buffered", "uncached"])
    assert set(space.dimensions) == {"buffered", "uncached"}
    assert space.baseline == Candidate.of("buffered", {}, "baseline")
    assert "hybrid" not in {one.writer for one in space.known}


def test_nothing_works(tmp_path: Path) -> None:
    """The error has every reason; a misspelt name is another error."""
    with pytest.raises(UnavailableError, match=r"no writer is available .*s3://bucket/prefix"):
        space_of(str(tmp_path), ["s3"])
    with pytest.raises(UnknownNameError, match="did you mean 'hybrid'"):
        space_of(str(tmp_path), ["hybird"])


def test_neighbours_differ_in_one_step(tmp_path: Path) -> None:
    """A setting in the middle has two per option, a setting at an end one."""
    space = space_of(str(tmp_path), ["buffered"])
    own = Candidate.of("buffered", {"block_size": "1MiB", "threads": 2}, "drawn")
    found = {one.label for one in space.neighbours(own)}
    assert found == {
        "buffered,block_size=4MiB,threads=2",
        "buffered,block_size=1MiB",
        "buffered,block_size=1MiB,threads=4",
        "buffered,block_size=1MiB,threads=2,fallocate=false",
    }


def test_a_default_outside_the_search_range_is_searched_too() -> None:
    """The first setting is part of the space."""
    (info,) = (one for one in S3Writer.Options.describe() if one.name == "threads")
    (found,) = (one for one in Dimension.all_of(S3Writer) if one.option == "threads")
    assert set(found.values) == {*info.search, info.default}
