"""Each writer counts the latency of every block, part and sync that it moves, also in a record."""

import json

import numpy as np
import pytest

from iobench.results import load, read
from iobench.testing import content
from iobench.units import MIB
from iobench.writers.image import FileImage
from iobench.writers.registry import make
from iobench.writers.transfer import Transfer

_LARGE, _SMALL = 5 * MIB + 5, 100
_BLOCKS = 6 + 1  # of 1 MiB: the last ones of both files are shorter
_WRITERS = ("buffered", "uncached", "odirect", "uring", "hybrid", "aiofiles")


def counts(transfer: Transfer) -> dict[str, int]:
    return {name: one.count for name, one in transfer.latencies.items()}


def images() -> list[FileImage]:
    sizes = {"large": _LARGE, "small": _SMALL}
    return [FileImage.of(name, [content(size, seed=1)]) for name, size in sizes.items()]


@pytest.mark.parametrize("name", _WRITERS)
def test_a_file_writer_counts_its_blocks(name: str, target) -> None:
    """As many writes and reads as blocks, in a file and in a stream, and every sync."""
    writer = make(name, block_size=MIB)
    if not writer.available(target).ok:
        pytest.skip(writer.available(target).reason)
    saved = counts(writer.write_many(images(), target))
    assert saved == {"write": _BLOCKS, "sync": 2}
    restored = {"read": 0}
    for image in images():
        empty = FileImage.of(image.path, [np.zeros(image.size_bytes, dtype=np.uint8)])
        restored["read"] += counts(writer.read(empty, target))["read"]
    assert restored == {"read": _BLOCKS}
    with writer.open(target / "stream") as stream:
        stream.write(content(_LARGE, seed=2))
    assert stream.transfer is not None
    assert counts(stream.transfer) == {"write": 6, "sync": 1}


def test_s3_counts_its_parts(server) -> None:
    """An upload for each part, one for a small object, and a read for each range."""
    with server.active():
        writer = make("s3", part_size=5 * MIB, threads=2)
        assert counts(writer.write_many(images(), server.target)) == {"upload": 2 + 1}
        large = FileImage.of("large", [np.zeros(_LARGE, dtype=np.uint8)])
        assert counts(writer.read(large, server.target)) == {"read": 2}


def test_a_run_records_and_shows_them(iobench_inside, tiny_path, target, tmp_path) -> None:
    """The record has a latency of every operation of every sample; the table, the JSON document and
    the data frame have their percentiles."""
    record = tmp_path / "run.jsonl"
    done = iobench_inside(
        *("run", tiny_path, "--target", target, "--repeat", "2", "-v"),
        *("--writer", "buffered,aiofiles", "--no-fio", "-o", record),
    )
    assert done.returncode == 0, done.stderr
    for heading in ("block write", "block read", "p99.9", "sync"):
        assert heading in done.stdout
    samples = read(record).samples
    assert len(samples) == 8
    for sample in samples:
        kind = "write" if sample.operation == "save" else "read"
        operations = sum(one.operations for one in sample.paths.values())
        assert sample.latencies[kind].count == operations > 0
        assert 0 < sample.latencies[kind].percentile_s(50) <= sample.elapsed_s
    shown = iobench_inside("show", record, "--format", "json")
    for summary in json.loads(shown.stdout)["summaries"]:
        kind = "write" if summary["operation"] == "save" else "read"
        figures = summary["latencies"][kind]
        assert 0 < figures["p50_s"] <= figures["max_s"]
        assert figures["operations"] == summary["paths"][summary["writer"]]
    saves = load(record).query("operation == 'save'")
    assert (saves["latency.write.p50_s"] > 0).all()
