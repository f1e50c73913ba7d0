"""The writers of files on a bucket mounted by s3fs, which is FUSE over an object store.

It runs a selection of the suite, because every file costs ten requests or more. `check_writer` runs
all of it. `make test` has one writer that uses the page cache and one that does not, as all writers
make and publish their files alike.
"""

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.s3_servers import s3_server
from support.s3fs import mounted_s3fs

from iobench.errors import UnavailableError
from iobench.testing import Directory, writer_checks
from iobench.testing.suite import run_checks
from iobench.writers import registry

_OF_EACH = (
    *("sizes_around_alignments", "another_size_replaced", "nested_paths", "torch_save_in_one_line"),
    *("failed_stream_publishes_nothing", "failed_write_publishes_nothing"),
    "available_without_a_trace",
)
_OF_TWO = (
    *("sizes_around_blocks", "many_tiny_segments", "every_kind_of_buffer", "partial_reads"),
    *("another_size_is_a_mismatch", "missing_file", "transfers_add_up"),
)
_QUICK = ("buffered", "odirect")
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
        with s3_server("moto") as server, mounted_s3fs(server) as at:
            yield at
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.root
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in _QUICK else pytest.mark.exhaustive)
        for name in _SETTINGS
    ],
)
def test_s3fs(name: str, bucket) -> None:
    """Each selected claim holds on s3fs."""
    make = functools.partial(registry.make, name, block_size="64KiB", **_SETTINGS[name])
    answer = make().available(bucket)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    names = {*_OF_EACH, *(_OF_TWO if name in _QUICK else ())}
    checks = [check for check in writer_checks() if check.name in names]
    assert len(checks) == len(names)
    run_checks(checks, make, lambda check: Directory(bucket / name / check.name))
