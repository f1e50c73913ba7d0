"""The keywords of the writers' constructors, as type checkers see them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from iobench import writers
from iobench.writers import options, registry

_VALUES = {
    "aiofiles": options.AiofilesValues,
    "buffered": options.CachedValues,
    "gds": options.DirectValues,
    "hybrid": options.HybridValues,
    "null": options.NullValues,
    "odirect": options.DirectValues,
    "s3": options.S3Values,
    "uncached": options.UncachedValues,
    "uring": options.UringValues,
}


@pytest.mark.parametrize("name", registry.names())
def test_the_keywords_are_the_options(name: str) -> None:
    """Names and types; a size may be text, too."""
    options, found = registry.writer_class(name).Options, get_type_hints(_VALUES[name])
    hints = get_type_hints(options)
    sizes = {one.name for one in options.describe() if one.unit == "bytes"}
    expected = {
        field.name: int | str if field.name in sizes else hints[field.name]
        for field in dataclasses.fields(options)
    }
    assert found == expected


@pytest.mark.parametrize("name", registry.names())
def test_each_writer_can_be_imported_from_the_package(name: str) -> None:
    found = registry.writer_class(name)
    assert getattr(writers, found.__name__) is found


def test_mypy_refuses_a_misspelt_option(tmp_path: Path) -> None:
    """Of every writer, with the line; what is right passes."""
    right = [
        'writers.ODirectWriter(block_size="8MiB", threads=2)',
        "writers.BufferedWriter()",
        "writers.GdsWriter(threads=1)",
        'writers.S3Writer(part_size="16MiB", verify_tls=False)',
    ]
    classes = [registry.writer_class(name).__name__ for name in registry.names()]
    wrong = [f"writers.{name}(thread=2)" for name in classes]
    script = tmp_path / "script.py"
    script.write_text("\n".join(["from iobench import writers", *right, *wrong]) + "\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    lines = done.stdout.splitlines()
    errors = [line for line in lines if ": error: " in line]
    assert len(errors) == len(wrong), done.stdout
    for number, (line, name) in enumerate(zip(errors, classes, strict=True)):
        assert f":{number + len(right) + 2}: error: Unexpected keyword argument" in line
        assert f'"{name}"' in line
