"""Checks: what a writer promises about itself, its options and its Transfers."""

from __future__ import annotations

import threading
from collections.abc import Callable

from iobench.errors import OptionError, TransferError, UnknownNameError
from iobench.testing.check import check
from iobench.testing.content import BrokenImage, content, empty_like
from iobench.testing.expect import expect, expect_raises, expect_same
from iobench.testing.harness import WriterHarness
from iobench.writers.transfer import Transfer


@check(needs_storage=False)
def available_without_a_trace(rig: WriterHarness) -> None:
    """`available` says yes where the other checks run, leaves nothing, and `require` agrees."""
    answer = rig.writer.available(rig.place.target)
    expect(answer.ok, f"not available: {answer.reason} {answer.remedy}")
    rig.writer.require(rig.place.target)
    expect(not rig.place.names(), f"left behind: {rig.place.names()}")


@check(needs_storage=False)
def options_round_trip(rig: WriterHarness) -> None:
    """Options come back equal from plain values and from text, and make an equal writer."""
    options = rig.writer.options
    kind = type(rig.writer)
    plain = options.to_dict()
    text = {info.name: info.show(plain[info.name]) for info in options.describe()}
    for values in (plain, text):
        again = kind(kind.Options.from_mapping(values))
        expect(again.options == options, f"{values} gives {again.options}")
    expect(set(plain) == {info.name for info in options.describe()}, "to_dict leaves some out")


@check(needs_storage=False)
def options_describe_themselves(rig: WriterHarness) -> None:
    """Every option has help, a default within its range, and search values within it too."""
    for info in type(rig.writer).Options.describe():
        expect(info.help, f"option {info.name} has no help")
        for value in (info.default, *info.search, *info.choices):
            expect(info.parse(value) == value, f"option {info.name}: {value} is out of its range")


@check(needs_storage=False)
def wrong_options_refused(rig: WriterHarness) -> None:
    """An option that there is not, or a value out of range, is refused with its name."""
    kind = type(rig.writer)
    error = expect_raises(UnknownNameError, kind, no_such_option=1)
    expect("no_such_option" in str(error), f"the message names not the option: {error}")
    for info in kind.Options.describe():
        error_ = expect_raises(OptionError, kind, **{info.name: object()})
        expect(info.name in str(error_), f"the message names not {info.name}: {error_}")
        if info.low is not None:
            expect_raises(OptionError, kind, **{info.name: info.low - 1})
        if info.high is not None:
            expect_raises(OptionError, kind, **{info.name: info.high + 1})


def _expect_adds_up(moved: Transfer, rig: WriterHarness, operation: str, size: int) -> None:
    who = f"{rig.writer.name} {operation} of {size} bytes"
    expect(moved.writer == rig.writer.name, f"{who}: of writer {moved.writer!r}")
    expect(moved.operation == operation, f"{who}: operation is {moved.operation!r}")
    expect((moved.files, moved.bytes) == (1, size), f"{who}: {moved.files} files, {moved.bytes}")
    expect(moved.elapsed_s > 0, f"{who}: took {moved.elapsed_s} s")
    expect(all(seconds >= 0 for seconds in moved.phases_s.values()), f"{who}: {moved.phases_s}")
    for phases in (moved.phases_s.keys() & {"write"}, moved.phases_s.keys() - {"write"}):
        spent_s = sum(moved.phases_s[name] for name in phases)  # `write` may run next to the rest
        expect(spent_s <= 1.1 * moved.elapsed_s + 0.05, f"{who}: {moved.phases_s} in its time")
    told = sum(path.bytes for path in moved.paths.values())
    expect(told >= size, f"{who}: its paths took {told} bytes")
    expect(all(path.operations > 0 for path in moved.paths.values()), f"{who}: {moved.paths}")
    expect(
        all(f.wanted and f.used and f.reason for f in moved.fallbacks),
        f"{who}: a fallback without its reason: {moved.fallbacks}",
    )


@check(needs_storage=False)
def transfers_add_up(rig: WriterHarness) -> None:
    """A Transfer tells all bytes, by the paths they took, and phases that are not negative."""
    for size in (0, 1, 4097, 3 * rig.block_size + 5):
        image = rig.image("file", content(size))
        _expect_adds_up(rig.write(image), rig, "write", size)
        _expect_adds_up(rig.read(empty_like(image)), rig, "read", size)
        with rig.open("stream") as stream:
            expect(stream.transfer is None, "a Transfer before the file is published")
            stream.write(content(size))
        assert stream.transfer is not None
        _expect_adds_up(stream.transfer, rig, "write", size)


@check(needs_storage=False)
def durable_is_labelled(rig: WriterHarness) -> None:
    """A write is labelled durable exactly when the writer stores and nothing else was asked."""
    image = rig.image("file", content(5000))
    for durable in (True, False):
        moved = rig.write(image, durable=durable)
        expect(moved.durable == (durable and rig.stores), f"durable={durable}: {moved}")
        rig.expect_stored("file", content(5000))
    expect(rig.write(image, sync_directory=False).bytes == 5000, "sync_directory=False")
    with rig.open("stream") as stream:
        stream.write(b"x")
    assert stream.transfer is not None
    expect(stream.transfer.durable == rig.stores, f"a stream: {stream.transfer}")


def _at_once(jobs: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        try:
            barrier.wait()
            job()
        except BaseException as error:  # noqa: BLE001 -- raised below, in the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@check(needs_storage=False)
def several_threads_at_once(rig: WriterHarness) -> None:
    """One writer moves different files from several threads without mixing them."""

    def job(number: int) -> Callable[[], None]:
        data = content(2 * rig.block_size + 100 * number + 1, number)

        def run() -> None:
            for _ in range(2):
                rig.expect_round_trip(rig.image(f"new/{number}", data), data)
                with rig.open(f"new/stream-{number}") as stream:
                    for start in range(0, len(data), 50_000):
                        stream.write(data[start : start + 50_000])
                rig.expect_stored(f"new/stream-{number}", data)

        return run

    _at_once([job(number) for number in range(4)])


@check()
def another_writer_reads_it(rig: WriterHarness) -> None:
    """What one writer wrote another one made from the same options reads."""
    data = content(rig.block_size + 77)
    rig.write(rig.image("file", data))
    back = empty_like(rig.image("file", data))
    rig.make_writer().read(back, rig.place.target)
    expect_same(back.views(0, len(data))[0], data, "read by another writer")


@check(needs_storage=False)
def many_files_together(rig: WriterHarness) -> None:
    """write_many stores every file, in new directories too, and tells of all of them at once."""
    sizes = [0, 1, 4097, rig.block_size + 3, *(100 * number for number in range(140))]
    datas = {f"many/{number}": content(size, number) for number, size in enumerate(sizes)}
    images = [rig.image(name, data) for name, data in datas.items()]
    rig._made.update(datas)
    moved = rig.writer.write_many(iter(images), rig.place.target)
    expect((moved.files, moved.bytes) == (len(sizes), sum(sizes)), f"told of {moved}")
    expect(moved.durable == rig.stores, f"durable: {moved.durable}")
    for name, data in datas.items():
        rig.expect_stored(name, data)
    expect(not rig.writer.write_many([], rig.place.target, durable=False).files, "of no files")


@check()
def one_of_many_fails(rig: WriterHarness) -> None:
    """When one of many files fails, each name holds a whole file or what it held before."""
    rig.put("0", b"before")
    rig.put("2", b"before")
    good = [content(5000, number) for number in range(4)]
    images = [rig.image(str(number), data) for number, data in enumerate(good)]
    images[2] = BrokenImage.at("2", content(5000), 10)
    rig._made.update("0123")
    expect_raises(TransferError, rig.writer.write_many, images, rig.place.target)
    rig.expect_stored("2", b"before")
    for number in (0, 1, 3):
        found = rig.place.stored(str(number))
        before = b"before" if number == 0 else None
        expect(found in (before, good[number].tobytes()), f"{number}: neither old nor new")
    rig.expect_no_leftovers()
