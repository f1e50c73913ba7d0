"""Every registered writer, with several settings, passes the conformance suite."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.check_groups import GROUPS, check_groups

from iobench.testing import Check
from iobench.testing.suite import run_checks
from iobench.writers import registry
from iobench.writers.base import Writer

_SETTINGS = {
    "buffered": (
        {},
        {"block_size": "4KiB"},
        {"block_size": "64KiB", "threads": 3, "fallocate": False},
    ),
    "uncached": (
        {},
        {"block_size": "4KiB", "threads": 3},
        {"block_size": "64KiB", "method": "sync_file_range"},
        {"block_size": "1MiB", "fallocate": False},
    ),
    "odirect": (
        {},
        {"block_size": "4KiB", "threads": 1},
        {"block_size": "64KiB", "threads": 3},
        {"block_size": "1MiB", "fallocate": False},
    ),
    "hybrid": (
        {},
        {"block_size": "4KiB", "iodepth": 1},
        {"block_size": "64KiB", "iodepth": 3, "uring": False, "small_size": "8KiB"},
        {"block_size": "64KiB", "small_size": "4KiB", "paths": "uncached", "fallocate": False},
        {"block_size": "64KiB", "small_size": "16KiB", "paths": "direct", "read_soon": True},
    ),
    "aiofiles": (
        {},
        {"block_size": "64KiB", "iodepth": 3},
        {"block_size": "1MiB", "fallocate": True},
    ),
    "uring": (
        {},
        {"block_size": "4KiB", "iodepth": 1},
        {"block_size": "64KiB", "iodepth": 3, "rings": 2},
        {"block_size": "64KiB", "rings": 3, "direct": False},
        {"block_size": "1MiB", "fallocate": False},
    ),
    "null": ({}, {"block_size": "4KiB", "threads": 3}),
    "s3": (),  # in test_s3.py, with servers
    "gds": (),  # in unit/writers/test_gds.py with a fake; on a GPU in integration/test_gpu.py
}
# Settings for every kind of file system. On each, the first setting of a writer runs the checks of
# bytes, streams, failures and durability, which depend on it. The others (memory, torch, reads,
# options, threads) take the same path everywhere: `test_here` runs them, on the machine's own
# device with the defaults. `make test-all` runs all checks on every file system.
_ELSEWHERE = {
    **dict.fromkeys(
        ("buffered", "uncached", "odirect"),
        ({"block_size": "64KiB", "threads": 3}, {"block_size": "1MiB", "fallocate": False}),
    ),
    "hybrid": (
        {"block_size": "64KiB", "iodepth": 3, "small_size": "8KiB"},
        {"block_size": "64KiB", "iodepth": 3, "uring": False, "paths": "direct"},
    ),
    "aiofiles": ({"block_size": "64KiB", "iodepth": 3},),
    "uring": (
        {"block_size": "64KiB", "iodepth": 4, "rings": 2},
        {"block_size": "1MiB", "fallocate": False},
        {"block_size": "64KiB", "direct": False},
    ),
}


_OF_OTHERS = ("bytes", "memory", "reads", "streams", "failures")
_OF_FILE_SYSTEMS = ("bytes", "streams", "failures", "durability")
_KINDS = ("tmpfs", "ext4", "xfs", "btrfs", "overlay", "fuse")
_WITH_OTHERS, _ALSO_HERE = "tmpfs", "ext4"
"""The kind on which `make test` runs other settings than the first one, and that of `test_here`."""


def _cases(
    settings: dict[str, tuple[dict[str, object], ...]],
) -> Iterator[tuple[str, str, int, tuple[object, ...]]]:
    """Each group of checks with the first setting of each writer; _OF_OTHERS with the others.

    Yields the name of the case, the group, the number of the setting, and the arguments.
    """
    for name, several in settings.items():
        stores = registry.writer_class(name).stores
        for number, options in enumerate(several):
            shown = ",".join([name, *(f"{k}={v}" for k, v in options.items())])
            groups = check_groups(stores=stores, groups=_OF_OTHERS if number else GROUPS)
            for group, checks in groups.items():
                yield f"{shown}-{group}", group, number, (checks, name, options)


def _here() -> Iterator[object]:
    for shown, _, _, arguments in _cases(_SETTINGS):
        yield pytest.param(*arguments, id=shown)


def _elsewhere() -> Iterator[object]:
    """The cases of each kind of file system."""
    for kind in _KINDS:
        for shown, group, number, arguments in _cases(_ELSEWHERE):
            marks = [pytest.mark.root]
            asked = _OF_FILE_SYSTEMS if kind != _ALSO_HERE else ("durability",)
            if group not in asked or (number and kind != _WITH_OTHERS):
                marks.append(pytest.mark.exhaustive)
            yield pytest.param(kind, *arguments, id=f"{kind}-{shown}", marks=marks)


def test_no_writer_is_forgotten() -> None:
    """Every registered writer has settings here, so the suite covers each of them."""
    assert set(_SETTINGS) == set(registry.names())


@pytest.mark.parametrize(("checks", "name", "options"), list(_here()))
def test_here(checks, name, options, directory) -> None:
    """Each claim holds: by default on the temporary directory's device, else on a quick ext4."""
    _run(checks, functools.partial(registry.make, name, **options), directory)


@pytest.fixture
def directory(options: dict[str, object], request: pytest.FixtureRequest) -> Path:
    """A directory on the machine's own device for default options; others need not wait for it."""
    found: Path = request.getfixturevalue("on_ext4" if options else "tmp_path")
    return found


@pytest.mark.parametrize(
    ("mounted", "checks", "name", "options"), list(_elsewhere()), indirect=["mounted"]
)
def test_mounted(checks, name, options, mounted) -> None:
    """Each claim holds on every kind of file system that is available here."""
    _run(checks, functools.partial(registry.make, name, **options), mounted)


def _run(checks: tuple[Check, ...], make: Callable[[], Writer], directory: Path) -> None:
    answer = make().available(directory)
    if not answer.ok:
        pytest.skip(f"{answer.reason} {answer.remedy}")
    run_checks(checks, make, lambda _: directory)
