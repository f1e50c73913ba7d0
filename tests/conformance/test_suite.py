"""The suite itself: each broken writer fails at the claim that it breaks."""

import os
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.check_groups import check_groups

from iobench import linux
from iobench.bench.targets.instruments import Instruments
from iobench.environment import DeviceCounters, DeviceMonitor
from iobench.testing import check_durability, check_writer, writer_checks
from iobench.testing.suite import run_checks
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage
from iobench.writers.local import posix
from iobench.writers.null import NullWriter
from iobench.writers.stream import BlockStream

_CHECKS = {item.name: item for item in writer_checks()}


class _LosesTheTail(BufferedWriter):
    def _send(self, file, image, meter):
        kept = image.size_bytes - image.size_bytes % 4096
        super()._send(file, FileImage.of(image.path, image.views(0, kept)), meter)


class _WritesInPlace(BufferedWriter):
    def write(self, image, target, **how):
        path = Path(target, image.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return super().write(image, target, **how)


class _LeavesAFile(BufferedWriter):
    def write(self, image, target, **how):
        Path(target, "leftover").touch()
        return super().write(image, target, **how)


class _LeaksADescriptor(BufferedWriter):
    def read(self, image, target, **where):
        os.dup(0)
        return super().read(image, target, **where)


class _LeaksAThread(BufferedWriter):
    ended = threading.Event()

    def open(self, target, size=None) -> BlockStream:
        threading.Thread(target=self.ended.wait, daemon=True).start()
        return super().open(target, size)


class _ReadsTooMuch(BufferedWriter):
    def _receive_files(self, reads, meter):
        whole = [one._replace(ranges=[(0, one.image.size_bytes)]) for one in reads]
        super()._receive_files(whole, meter)


class _TakesAnySize(BufferedWriter):
    def read_ranges(self, image, target, ranges):
        with mock.patch.object(posix, "open_source", lambda path, _: os.open(path, os.O_RDONLY)):
            return super().read_ranges(image, target, ranges)


class _AlwaysDurable(BufferedWriter):
    def write(self, image, target, *, durable=True, sync_directory=True):
        return super().write(image, target, durable=True)


class _NeverSyncs(BufferedWriter):
    def write(self, image, target, **how):
        done = super().write(image, target, **how | {"durable": False})
        return replace(done, durable=True)


class _ForgetsTheName(BufferedWriter):
    def write(self, image, target, **how):
        return super().write(image, target, **how | {"sync_directory": False})


class _WidensPermissions(BufferedWriter):
    def write(self, image, target, **how):
        done = super().write(image, target, **how)
        Path(target, image.path).chmod(0o644)
        return done


class _ReplacesAnything(BufferedWriter):
    def write(self, image, target, **how):
        Path(target, image.path).unlink(missing_ok=True)
        return super().write(image, target, **how)


class _InventsPhases(BufferedWriter):
    def _send(self, file, image, meter):
        super()._send(file, image, meter)
        meter.seconds["gather"] = 60.0


class _ForgetsBytes(BufferedWriter):
    def _send(self, file, image, meter):
        super()._send(file, image, meter)
        meter.paths.clear()


class _MixesThreads(BufferedWriter):
    shared = np.empty(1 << 20, dtype=np.uint8)

    def _send(self, file, image, meter):
        for start in range(0, image.size_bytes, len(self.shared)):
            stop = min(start + len(self.shared), image.size_bytes)
            image.gather(start, stop, self.shared)
            threading.Event().wait(0.001)
            os.pwrite(file.fd, self.shared[: stop - start].data, start)
        meter.count("buffered", image.size_bytes)


class _TakesAnyTarget(BufferedWriter):
    @classmethod
    def check_scheme(cls, target):
        pass


class _ClosesWhateverHappens(BufferedWriter):
    def _stream(self, file, meter, size):
        stream = super()._stream(file, meter, size)
        stream._in_trouble = lambda: False
        return stream


@pytest.mark.parametrize(
    ("writer", "names"),
    [
        (_LosesTheTail, ["sizes_around_alignments", "many_tiny_segments", "any_address"]),
        (_WritesInPlace, ["failed_write_publishes_nothing"]),
        (_LeavesAFile, ["nested_paths"]),
        (_LeaksADescriptor, ["partial_reads", "sizes_around_blocks"]),
        (_LeaksAThread, ["stream_equals_write", "torch_save_in_one_line"]),
        (_ReadsTooMuch, ["partial_reads", "cut_anew_for_reading"]),
        (_TakesAnySize, ["another_size_is_a_mismatch"]),
        (_AlwaysDurable, ["durable_is_labelled"]),
        (_ForgetsBytes, ["transfers_add_up"]),
        (_InventsPhases, ["transfers_add_up"]),
        (_ForgetsTheName, ["new_names_are_synced"]),
        (_WidensPermissions, ["replaced_files_keep_owner_and_permissions"]),
        (_ReplacesAnything, ["a_name_that_is_a_pipe_or_device"]),
        (_MixesThreads, ["several_threads_at_once"]),
        (_ClosesWhateverHappens, ["failed_stream_publishes_nothing"]),
        (_TakesAnyTarget, ["other_kinds_of_targets_refused"]),
    ],
)
def test_a_broken_writer_fails(writer, names, tmp_path, monkeypatch) -> None:
    """A writer with one fault raises AssertionError in the checks of the broken claims."""
    monkeypatch.chdir(tmp_path)  # one of them writes to ./s3:
    _LeaksAThread.ended.clear()
    for name in names:
        with pytest.raises(AssertionError):
            _CHECKS[name](writer, tmp_path)
    _LeaksAThread.ended.set()


def test_a_writer_that_never_syncs_fails(tmp_path) -> None:
    """Its pages are dirty after a write that it reports as durable.

    Another program that syncs the whole file system just then hides that. So one of several
    attempts must see the dirty pages.
    """
    unseen = Instruments.probe(tmp_path, DeviceMonitor(tmp_path)).unseen
    if unseen:
        pytest.skip(unseen)
    seen = []
    for attempt in range(20):
        target = tmp_path / str(attempt)
        target.mkdir()
        try:
            _CHECKS["durable_files_are_synced"](_NeverSyncs, target)
        except AssertionError as failure:
            seen.append(str(failure))
            if "bytes are dirty after a durable write" in seen[-1]:
                return
    pytest.fail(f"no attempt saw dirty pages: {seen}")


class _WritesBack(BufferedWriter):
    """Leaves no dirty page, and never syncs: neither metadata nor the device's own cache."""

    def write(self, image, target, **how):
        done = super().write(image, target, **how | {"durable": False})
        with Path(target, image.path).open("rb") as file:
            linux.sync_file_range(file.fileno(), 0, image.size_bytes, 7)
        return replace(done, durable=True)


class _Flushed(DeviceMonitor):
    """Counts each os.fsync as one flush; other programs flush the real device."""

    count = 0

    def read(self):
        return DeviceCounters(read_bytes=0, write_bytes=0, flushes=self.count)


def test_a_writer_that_only_writes_back_fails(tmp_path, monkeypatch) -> None:
    fsync = os.fsync

    def counted(fd: int) -> None:
        _Flushed.count += 1
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)
    monkeypatch.setattr(check_durability, "DeviceMonitor", _Flushed)
    _CHECKS["durable_files_are_synced"](BufferedWriter, tmp_path)
    with pytest.raises(AssertionError, match="write returned before the device was flushed"):
        _CHECKS["durable_files_are_synced"](_WritesBack, tmp_path)


def test_check_writer(tmp_path) -> None:
    """check_writer passes a correct writer, and names every claim that a broken one breaks."""
    check_writer(NullWriter, tmp_path / "good")
    with pytest.raises(ExceptionGroup) as caught:
        check_writer(_AlwaysDurable, tmp_path / "broken")
    (only,) = caught.value.exceptions
    assert _CHECKS["durable_is_labelled"].claim in only.__notes__[0]


def test_storage_checks_refuse_a_writer_that_stores_nothing(tmp_path) -> None:
    """A check of stored bytes does not silently pass for a writer that stores none."""
    with pytest.raises(AssertionError, match="does not apply to 'null'"):
        _CHECKS["nested_paths"](NullWriter, tmp_path)


def test_every_check_is_in_a_group() -> None:
    """The groups, in which other tests run the suite, leave no check out."""
    for stores in (True, False):
        grouped = [item for checks in check_groups(stores=stores).values() for item in checks]
        assert grouped == writer_checks(stores=stores)


def test_a_group_reports_every_check_that_fails(tmp_path) -> None:
    """The error has each failed check with its claim; the checks after the first run too."""
    checks = [_CHECKS[name] for name in ("nested_paths", "missing_file", "partial_reads")]
    calls: list[int] = []
    with pytest.raises(ExceptionGroup, match="nested_paths, partial_reads") as caught:
        run_checks(checks, _LeavesAFile, lambda _: tmp_path, lambda: calls.append(1))
    for error, name in zip(caught.value.exceptions, ("nested_paths", "partial_reads"), strict=True):
        assert _CHECKS[name].claim in error.__notes__[0]
    assert len(calls) == 1


def test_every_check_has_a_claim() -> None:
    """Names are unique, and each claim is one sentence."""
    every = [*writer_checks(), *writer_checks(large=True)]
    assert len({item.name for item in every}) == len(every)
    assert all(item.claim.endswith(".") for item in every)
    assert set(writer_checks(stores=False)) < set(writer_checks())
