"""Liars: writers that report what they did not do; the bench must call none of them VALID.

Each is `buffered` with one lie. Run as a program in a directory of a real file system, it prints
the table of docs/statistics.md:

    PYTHONPATH=tests python -m support.liars DIRECTORY
"""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from iobench import linux, workloads
from iobench.bench.contenders.base import WriterContender
from iobench.bench.judging.repeat import Repeat
from iobench.bench.judging.verdict import Context, Reason, judge, with_verification
from iobench.bench.plan import Plan
from iobench.bench.runner import Runner
from iobench.bench.targets.directory import DirectoryTarget
from iobench.results import (
    CeilingSample,
    Failure,
    ResultFile,
    ResultWriter,
    Sample,
    TrainBlock,
    read,
)
from iobench.units import KIB
from iobench.writers.base import Source, Writer
from iobench.writers.image import FileImage, Ranges
from iobench.writers.transfer import Meter, PathCount, Transfer
from support.one_by_one import OneByOne

_HEADER = "| writer | what it does | save | restore | why |"
_SMALL = 4 * KIB  # most of the tensors are larger
_WRITE_AND_WAIT = 7  # all flags of sync_file_range(2)

_WORKLOAD = """\
schema: iobench.workload/1
description: "one layer, 5 MiB"
model:
  name: liars
  family: llama
  arch: {vocab_size: 256, hidden_size: 192, num_layers: 1, num_heads: 4, ffn_hidden_size: 256}
layout: {id: hf-trainer, world_size: 1}
"""


class Liar(OneByOne):
    """An honest `buffered` under another name. What it claims is what its Transfers say."""

    lie: ClassVar[str]
    """What it does, for the table."""
    reason: ClassVar[str]
    """How the first reason of the verdict that names the lie begins."""
    lies_in: ClassVar[str] = "save"

    def __init__(self, *given: Any, **values: Any) -> None:
        super().__init__(*given, **values)
        self._kept: dict[str, bytes] = {}  # by the path of its image

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        return replace(super().write(image, target, **how), writer=self.name)


class SkipsSync(Liar):
    name = "skips-sync"
    lie = "writes to the page cache only, and reports a durable save"
    reason = "not durable: dirty pages were left after the save"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        how["durable"] = False
        return replace(super().write(image, target, **how), durable=True)


class AdmitsIt(Liar):
    name = "admits-it"
    lie = "does not sync, and reports `durable=False`"
    reason = "not durable: the writer itself reports that it did not sync"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        how["durable"] = False
        return super().write(image, target, **how)


class WritesBack(Liar):
    name = "writes-back"
    lie = "writes all pages back (`sync_file_range`), and never syncs"
    reason = "not durable: the writer returned before the device flushed its cache"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        how["durable"] = False
        done = super().write(image, target, **how)
        with Path(target, image.path).open("rb") as file:
            linux.sync_file_range(file.fileno(), 0, image.size_bytes, _WRITE_AND_WAIT)
        return replace(done, durable=True)


class Late(Liar):
    name = "late"
    lie = "reserves the space, writes other bytes elsewhere, and these when they are asked for"
    reason = "files are not as saved"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        meter, path = Meter(), Path(target, image.path)
        data = _bytes_of(image)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file, tempfile.TemporaryFile(dir=path.parent) as other:
            os.posix_fallocate(file.fileno(), 0, len(data))
            os.fsync(file.fileno())
            other.write(data)
            other.flush()
            os.fsync(other.fileno())
        self._kept[image.path] = data
        meter.count("buffered", len(data))
        return meter.transfer(self.name, "write", len(data), durable=True)

    def open_source(self, target: str | Path) -> Source:
        for name in [name for name in self._kept if str(target).endswith(f"/{name}")]:
            with Path(target).open("r+b") as file:
                file.write(self._kept.pop(name))
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return super().open_source(target)

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        self.open_source(Path(target, image.path)).close()
        return super().read(image, target, start=start, stop=stop)


class Unlinks(Liar):
    name = "unlinks"
    lie = "removes the file after the save"
    reason = "files are not as saved"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        done = super().write(image, target, **how)
        Path(target, image.path).unlink()
        return done


class Garbage(Liar):
    name = "garbage"
    lie = "writes the right header, and zeros for the tensors"
    reason = "wrong bytes: tensors differ from what was saved"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        first, *rest = image.segments  # the header; a zip's directory is the last
        memories = [first.memory] + [
            np.zeros(segment.length, np.uint8)
            if segment.length >= _SMALL and segment is not rest[-1]
            else segment.memory
            for segment in rest
        ]
        return super().write(FileImage.of(image.path, memories), target, **how)


class FromMemory(Liar):
    name = "from-memory"
    lie = "restores from memory while another process reads the file"
    reason = "the bytes did not come from the device"
    lies_in = "restore"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        self._kept[image.path] = _bytes_of(image)
        return super().write(image, target, **how)

    def read(
        self, image: FileImage, target: str | Path, *, start: int = 0, stop: int | None = None
    ) -> Transfer:
        meter = Meter()
        stop = image.size_bytes if stop is None else stop
        path = os.fspath(Path(target, image.path))
        # Not our child: the kernel adds what a child read to its parent's count. The pipe is at its
        # end when `cat` is.
        command = ["sh", "-c", 'cat "$1" >/dev/null &', "sh", path]
        subprocess.run(command, check=True, stderr=subprocess.PIPE)
        at = start
        for view in image.views(start, stop):
            view[:] = np.frombuffer(self._kept[image.path], np.uint8)[at : at + len(view)]
            at += len(view)
        meter.count("buffered", stop - start)
        return meter.transfer(self.name, "read", stop - start, durable=True)

    def read_ranges(self, *given: Any) -> Transfer:
        return Writer.read_ranges(self, *given)


class OtherDevice(Liar):
    name = "other-device"
    lie = "restores from a copy on another device"
    reason = "the bytes did not come from the device"
    lies_in = "restore"

    # Of the process and not of a writer, which a later collection of garbage may free.
    _copies = tempfile.TemporaryDirectory(prefix="liar-")

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        done = super().write(image, target, **how)
        super().write(image, self._copies.name, **how)
        with Path(self._copies.name, image.path).open("rb") as copy:
            os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return done

    def read_ranges(self, image: FileImage, target: str | Path, ranges: Ranges) -> Transfer:
        return super().read_ranges(image, self._copies.name, ranges)


class Elsewhere(Liar):
    name = "elsewhere"
    lie = "writes the data to another directory, and leaves a symbolic link"
    reason = "files are not as saved"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        other = tempfile.mkdtemp(prefix="liar-", dir=Path(target).parent)
        done = super().write(image, other, **how)
        name = Path(target, image.path)
        name.parent.mkdir(parents=True, exist_ok=True)
        self._point(name, Path(other, image.path))
        return done

    @staticmethod
    def _point(name: Path, data: Path) -> None:
        name.symlink_to(data)


class Mounts(Elsewhere):
    name = "mounts"
    lie = "writes the data to another directory, and mounts each file at its name"
    reason = "files are not as saved"

    @staticmethod
    def _point(name: Path, data: Path) -> None:
        name.touch(exist_ok=False)
        subprocess.run(["mount", "--bind", data, name], check=True)


class InventsPhases(Liar):
    name = "invents-phases"
    lie = "reports ten times the phases that the clock can hold"
    reason = "phases that its time cannot hold"
    phases_s: ClassVar = {"gather": 10.0}

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        done = super().write(image, target, **how)
        return replace(done, phases_s={"write": done.elapsed_s, **self.phases_s})


class NotANumber(InventsPhases):
    name = "not-a-number"
    lie = "reports phases of NaN and infinite seconds"
    phases_s: ClassVar = {"gather": math.nan, "sync": math.inf}


class InventsPaths(Liar):
    name = "invents-paths"
    lie = "reports half of its bytes by `direct`, and no others"
    reason = "its paths do not add up to the bytes moved"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        done = super().write(image, target, **how)
        return replace(done, paths={"direct": PathCount(operations=1, bytes=done.bytes // 2)})


class SaysDirect(Liar):
    name = "says-direct"
    lie = "writes through the page cache, and reports all bytes by `direct`"
    reason = "went through the page cache"

    def write(self, image: FileImage, target: str | Path, **how: Any) -> Transfer:
        done = super().write(image, target, **how)
        return replace(done, paths={"direct": PathCount(operations=1, bytes=done.bytes)})


LIARS: tuple[type[Liar], ...] = (
    *(SkipsSync, AdmitsIt, WritesBack, Late, Unlinks, Garbage, FromMemory, OtherDevice, Elsewhere),
    *(Mounts, InventsPhases, NotANumber, InventsPaths, SaysDirect),
)


def _bytes_of(image: FileImage) -> bytes:
    return b"".join(part.tobytes() for part in image.views(0, image.size_bytes))


class _Silent:
    """Progress that is not shown."""

    def begin(self, steps: int | None) -> None: ...
    def step(self, what: str) -> None: ...
    def result(self, record: Sample | CeilingSample | Failure | TrainBlock) -> None: ...


def run(directory: Path, writers: Sequence[Writer]) -> ResultFile:
    """One repetition of a small checkpoint by each writer in `directory`, and its records."""
    description = directory / "liars.yaml"
    description.write_text(_WORKLOAD)
    target, record = directory / "target", directory / "liars.jsonl"
    target.mkdir()
    workload = workloads.load(str(description))
    plan = Plan(
        workload=workload,
        full_bytes=workload.size_bytes(),
        rank=0,
        contenders=tuple(map(WriterContender, writers)),
        targets=(DirectoryTarget(path=target),),
        repeat=Repeat(times=1),
        ceiling=False,
        seed=1,
    )
    with ResultWriter(record) as results:
        Runner(plan=plan, results=results, progress=_Silent()).run()
    return read(record)


def verdicts(result: ResultFile) -> dict[tuple[str, str], tuple[str, list[Reason]]]:
    """(status, reasons) of every save and restore, by writer and operation."""
    context = Context.of(result.run)
    found: dict[tuple[str, str], tuple[str, list[Reason]]] = {}
    for failure in result.failures:
        reason = Reason(text=failure.error.split(":")[0])
        found[failure.setting.writer, failure.operation] = "FAILED", [reason]
    for sample in with_verification(result.samples, context):
        verdict = judge(sample, context)
        key = sample.setting.writer, sample.operation
        found[key] = str(verdict.status), list(verdict.reasons)
    return found


def table(result: ResultFile, honest: Sequence[Writer]) -> list[str]:
    """The lines of the table in docs/statistics.md: each liar, then each honest writer."""
    found = verdicts(result)
    lines = [_HEADER, "| --- | --- | --- | --- | --- |"]
    for liar in LIARS:
        save, restore = found[liar.name, "save"], found[liar.name, "restore"]
        why = next(
            one.text
            for _, reasons in (save, restore)
            for one in reasons
            if one.text.startswith(liar.reason)
        )
        lines.append(f"| `{liar.name}` | {liar.lie} | {save[0]} | {restore[0]} | {why} |")
    for writer in honest:
        save, restore = found[writer.name, "save"], found[writer.name, "restore"]
        lines.append(f"| `{writer.name}` | its work | {save[0]} | {restore[0]} | |")
    return lines


def main() -> None:
    """Print the table for the directory that the command line names."""
    from iobench.writers.registry import make

    honest = [make(name) for name in ("buffered", "uncached", "odirect", "uring", "hybrid")]
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
        result = run(Path(directory), [*(liar() for liar in LIARS), *honest])
    sys.stdout.write("\n".join([*table(result, honest), ""]))


if __name__ == "__main__":
    main()
