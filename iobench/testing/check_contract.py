"""Checks: the promises of a writer about itself, its options and its Transfers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from iobench.errors import OptionError, TransferError, UnknownNameError, UsageError
from iobench.testing.check import check
from iobench.testing.content import BrokenImage, content, empty_like
from iobench.testing.harness import WriterHarness, expect, expect_raises, expect_same
from iobench.writers.transfer import Transfer

_JOBS = 4


@check(needs_storage=False)
def available_without_a_trace(harness: WriterHarness) -> None:
    """`available` is ok where the other checks run, leaves nothing behind, and `require` agrees."""
    answer = harness.writer.available(harness.test_target.target)
    expect(answer.ok, f"not available: {answer.reason} {answer.remedy}")
    harness.writer.require(harness.test_target.target)
    expect(not harness.test_target.names(), f"left behind: {harness.test_target.names()}")


@check(needs_storage=False)
def options_round_trip(harness: WriterHarness) -> None:
    """Options converted to plain values or to text and back are equal, and so is their writer. Each
    has a help text, and its default and search values are within its range.
    """
    options = harness.writer.options
    kind = type(harness.writer)
    plain = options.to_dict()
    text = {info.name: info.show(plain[info.name]) for info in options.describe()}
    for values in (plain, text):
        again = kind(kind.Options.from_mapping(values))
        expect(again.options == options, f"{values} gives {again.options}")
    expect(set(plain) == {info.name for info in options.describe()}, "to_dict omits an option")
    for info in options.describe():
        expect(info.help, f"option {info.name} has no help")
        for value in (info.default, *info.search, *info.choices):
            expect(info.parse(value) == value, f"option {info.name}: {value} is out of its range")


@check(needs_storage=False)
def wrong_options_refused(harness: WriterHarness) -> None:
    """An unknown option, or a value out of range, is refused, and the message has its name."""
    kind = type(harness.writer)
    error = expect_raises(UnknownNameError, kind, no_such_option=1)
    expect("no_such_option" in str(error), f"the message does not name the option: {error}")
    for info in kind.Options.describe():
        error_ = expect_raises(OptionError, kind, **{info.name: object()})
        expect(info.name in str(error_), f"the message does not name {info.name}: {error_}")
        if info.low is not None:
            expect_raises(OptionError, kind, **{info.name: info.low - 1})
        if info.high is not None:
            expect_raises(OptionError, kind, **{info.name: info.high + 1})


@check(needs_storage=False)
def other_kinds_of_targets_refused(harness: WriterHarness) -> None:
    """A target of a kind that the writer does not accept raises UsageError in every operation."""
    writer, image = harness.writer, harness.image("file", content(100))
    targets = {"file": "other-kinds-refused", "s3": "s3://bucket/run", "": "no-such://bucket/run"}
    for scheme, target in targets.items():
        if scheme in writer.schemes:
            continue
        expect_raises(UsageError, writer.write, image, target)
        expect_raises(UsageError, writer.write_many, [image], target)
        expect_raises(UsageError, writer.write_many, [], target)
        expect_raises(UsageError, writer.read, empty_like(image), target)
        expect_raises(UsageError, writer.open, f"{target}/file")
        expect_raises(UsageError, writer.open_source, f"{target}/file")
        expect_raises(UsageError, writer.require, target)


def _expect_adds_up(moved: Transfer, harness: WriterHarness, operation: str, size: int) -> None:
    who = f"{harness.writer.name} {operation} of {size} bytes"
    expect(moved.writer == harness.writer.name, f"{who}: of writer {moved.writer!r}")
    expect(moved.operation == operation, f"{who}: operation is {moved.operation!r}")
    expect((moved.files, moved.bytes) == (1, size), f"{who}: {moved.files} files, {moved.bytes}")
    expect(moved.elapsed_s > 0, f"{who}: took {moved.elapsed_s} s")
    expect(all(seconds >= 0 for seconds in moved.phases_s.values()), f"{who}: {moved.phases_s}")
    for phases in (moved.phases_s.keys() & {"write"}, moved.phases_s.keys() - {"write"}):
        spent_s = sum(moved.phases_s[name] for name in phases)  # `write` may run next to the rest
        expect(spent_s <= 1.1 * moved.elapsed_s + 0.05, f"{who}: {moved.phases_s} in its time")
    counted = sum(path.bytes for path in moved.paths.values())
    expect(counted >= size, f"{who}: its paths took {counted} bytes")
    expect(all(path.operations > 0 for path in moved.paths.values()), f"{who}: {moved.paths}")
    expect(
        all(f.wanted and f.used and f.reason for f in moved.fallbacks),
        f"{who}: a fallback without its reason: {moved.fallbacks}",
    )


@check(needs_storage=False)
def transfers_add_up(harness: WriterHarness) -> None:
    """A Transfer counts all bytes, by path, and its phases are not negative."""
    for size in (0, 1, 4097, 3 * harness.block_size + 5):
        image = harness.image("file", content(size))
        _expect_adds_up(harness.write(image), harness, "write", size)
        _expect_adds_up(harness.read(empty_like(image)), harness, "read", size)
        with harness.open("stream") as stream:
            expect(stream.transfer is None, "a Transfer before the file is published")
            stream.write(content(size))
        assert stream.transfer is not None
        _expect_adds_up(stream.transfer, harness, "write", size)


@check(needs_storage=False)
def durable_is_labelled(harness: WriterHarness) -> None:
    """A write is labelled durable if the writer stores and the caller asked for it, else not."""
    image = harness.image("file", content(5000))
    for durable in (True, False):
        moved = harness.write(image, durable=durable)
        expect(moved.durable == (durable and harness.stores), f"durable={durable}: {moved}")
        harness.expect_stored("file", content(5000))
    expect(harness.write(image, sync_directory=False).bytes == 5000, "sync_directory=False")
    with harness.open("stream") as stream:
        stream.write(b"x")
    assert stream.transfer is not None
    expect(stream.transfer.durable == harness.stores, f"a stream: {stream.transfer}")


@check(needs_storage=False)
def several_threads_at_once(harness: WriterHarness) -> None:
    """One writer moves different files from several threads without mixing them."""

    barrier = threading.Barrier(_JOBS)

    def run(number: int) -> None:
        data = content(2 * harness.block_size + 100 * number + 1, number)
        barrier.wait()
        for _ in range(2):
            harness.expect_round_trip(harness.image(f"new/{number}", data), data)
            with harness.open(f"new/stream-{number}") as stream:
                for start in range(0, len(data), 50_000):
                    stream.write(data[start : start + 50_000])
            harness.expect_stored(f"new/stream-{number}", data)

    with ThreadPoolExecutor(_JOBS) as pool:
        list(pool.map(run, range(_JOBS)))


@check()
def another_writer_reads_it(harness: WriterHarness) -> None:
    """A writer reads what another writer with the same options wrote."""
    data = content(harness.block_size + 77)
    harness.write(harness.image("file", data))
    back = empty_like(harness.image("file", data))
    harness.make_writer().read(back, harness.test_target.target)
    expect_same(back.views(0, len(data))[0], data, "read by another writer")


@check(needs_storage=False)
def many_files_together(harness: WriterHarness) -> None:
    """write_many stores every file, in new directories too; read_many reads them back.

    Both return one Transfer for all.
    """
    sizes = [0, 1, 4097, harness.block_size + 3, *(100 * number for number in range(140))]
    datas = {f"many/{number}": content(size, number) for number, size in enumerate(sizes)}
    images = [harness.image(name, data) for name, data in datas.items()]
    harness._made.update(datas)
    moved = harness.writer.write_many(iter(images), harness.test_target.target)
    expect((moved.files, moved.bytes) == (len(sizes), sum(sizes)), f"the Transfer is {moved}")
    expect(moved.durable == harness.stores, f"durable: {moved.durable}")
    for name, data in datas.items():
        harness.expect_stored(name, data)
    rooms = {name: np.zeros_like(data) for name, data in datas.items()}
    read = harness.writer.read_many(
        (harness.image(name, room) for name, room in rooms.items()), harness.test_target.target
    )
    expect((read.files, read.bytes) == (len(sizes), sum(sizes)), f"the Transfer is {read}")
    if harness.stores:
        for name, data in datas.items():
            expect_same(rooms[name], data, f"{name} as read_many read it")
    expect(
        not harness.writer.write_many([], harness.test_target.target, durable=False).files,
        "write_many of no files returned a Transfer with files",
    )


@check()
def one_of_many_fails(harness: WriterHarness) -> None:
    """When one of many files fails, each name holds a whole file or what it held before."""
    harness.put("0", b"before")
    harness.put("2", b"before")
    good = [content(5000, number) for number in range(4)]
    images = [harness.image(str(number), data) for number, data in enumerate(good)]
    images[2] = BrokenImage.at("2", content(5000), 10)
    harness._made.update("0123")
    expect_raises(TransferError, harness.writer.write_many, images, harness.test_target.target)
    harness.expect_stored("2", b"before")
    for number in (0, 1, 3):
        found = harness.test_target.stored(str(number))
        before = b"before" if number == 0 else None
        expect(found in (before, good[number].tobytes()), f"{number}: neither old nor new")
    harness.expect_no_leftovers()


@check()
def objects_are_listed_and_deleted(harness: WriterHarness) -> None:
    """`objects` of a writer of an object store; writers of files refuse it."""
    target = harness.test_target.target
    if harness.writer.schemes == ("file",):
        expect_raises(UsageError, harness.writer.objects, target)
        return
    for name in ("run-1/a", "run-1/b", "run-10/a"):
        harness.write(harness.image(name, content(10)))
    objects = harness.writer.objects(target)
    keys = sorted(objects.keys())
    top = keys[0].removesuffix("run-1/a") if keys else ""
    below = [key.removeprefix(top) for key in keys]
    expect(below == ["run-1/a", "run-1/b", "run-10/a"], f"keys() returns {keys}")
    expect(target.endswith(top.rstrip("/")), f"keys are those of the bucket, not {keys[0]}")
    expect(not objects.unfinished(), "an unfinished upload, where all have ended")
    names = sorted(objects.names("run-"))
    expect(names == ["run-1", "run-10"], f"names('run-') returns {names}")
    expect(not objects.names("a"), "names('a') returns what does not begin with it")
    for how in ("deleted", "deleted already"):
        objects.delete([f"{top}run-1/b", f"{top}no such object"])
        left = sorted(objects.keys())
        expect(left == [f"{top}run-1/a", f"{top}run-10/a"], f"{how}: {left} are left")
    harness.writer.objects(harness.test_target.locate("run-1")).remove(last="a")
    left = objects.keys()
    expect(left == [f"{top}run-10/a"], f"remove() below run-1 leaves {left}")
    expect(harness.test_target.stored("run-10/a") is not None, "remove() of run-1 removes run-10")
    harness.writer.close()
    expect(objects.keys() == left, "after close() the writer does not open new connections")
