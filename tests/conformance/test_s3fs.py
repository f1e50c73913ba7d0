"""The writers of files on a bucket mounted by s3fs, which is FUSE over an object store.

It runs a selection of the suite, because every file costs ten requests or more. `check_writer` runs
all of it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.check_groups import run_checks

from iobench.errors import UnavailableError
from iobench.testing import Directory, moto_s3, mounted_s3fs, writer_checks
from iobench.writers import registry

_ONLY = (
    *("sizes_around_alignments", "sizes_around_blocks", "longer_file_replaced", "nested_paths"),
    *("many_tiny_segments", "tensors_of_every_dtype", "torch_save_in_one_line", "partial_reads"),
    *("another_size_is_a_mismatch", "missing_file", "exception_publishes_nothing"),
    *("failed_write_keeps_the_old", "available_without_a_trace", "transfers_add_up"),
)
_SETTINGS: dict[str, dict[str, object]] = {
    "buffered": {"threads": 3},
    "uncached": {"threads": 3},
    "odirect": {"threads": 3},
    "uring": {"iodepth": 4, "rings": 2},
    "hybrid": {"small_size": "8KiB"},
    "aiofiles": {"iodepth": 3},
}


@pytest.fixture(scope="module")
def bucket() -> Iterator[Path]:
    """A bucket of moto's server, mounted as a directory."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    try:
        with moto_s3() as server, mounted_s3fs(server) as at:
            yield at
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.root
@pytest.mark.parametrize("name", _SETTINGS)
def test_s3fs(name: str, bucket: Path) -> None:
    """Each selected claim holds on s3fs."""
    make = functools.partial(registry.make, name, block_size="64KiB", **_SETTINGS[name])
    answer = make().available(bucket)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    checks = [check for check in writer_checks() if check.name in _ONLY]
    assert len(checks) == len(_ONLY)
    run_checks(checks, make, lambda check: Directory(bucket / name / check.name))
