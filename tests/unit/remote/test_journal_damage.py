"""`iobench tiers` on damaged journals and manifests: one line for each problem, no traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench.cli.tiers import tiers
from iobench.errors import IobenchError, TargetError
from iobench.remote.journal import JOURNAL, DrainEvent, DrainJournal, tiers_status

_EVENTS = tuple(
    replace(one, remote="/remote")
    for one in (
        DrainEvent(event="remote", at_s=1.0),
        DrainEvent(event="saved", at_s=2.0, step=1, serial=1, size_bytes=10, elapsed_s=0.5),
        DrainEvent(event="durable", at_s=3.0, step=1, serial=1, sent_bytes=10, elapsed_s=0.5),
        DrainEvent(event="verified", at_s=4.0, step=1, serial=1),
        DrainEvent(event="dropped", at_s=5.0, step=2, why="a copy has waited"),
        DrainEvent(event="failed", at_s=6.0, why="no space left"),
    )
)


def _line(document: str) -> bytes:
    return f"{xxhash.xxh3_64_hexdigest(document.encode())} {document}\n".encode()


def _written(directory: Path) -> bytes:
    (directory / JOURNAL).unlink(missing_ok=True)
    for event in _EVENTS:
        DrainJournal(directory).add(event)
    return (directory / JOURNAL).read_bytes()


def _shown(directory: Path) -> None:
    """Show it in both formats. Anything but an error of iobench fails the test."""
    for format_ in ("table", "json"):
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.suppress(IobenchError),
        ):
            tiers(directory, format_)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_FIELDS = st.sampled_from([*vars(_EVENTS[0])])


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(data=st.data())
def test_any_bytes(data: st.DataObject, tmp_path: Path) -> None:
    """Changed, removed and inserted bytes, and any bytes at all."""
    text = bytearray(_written(tmp_path))
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)))
    text[start:stop] = data.draw(st.binary(max_size=40))
    (tmp_path / JOURNAL).write_bytes(data.draw(st.sampled_from([bytes(text), bytes(text[:start])])))
    _shown(tmp_path)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60
)
@given(number=st.integers(0, len(_EVENTS) - 1), field=_FIELDS, value=_VALUES)
def test_any_value(number: int, field: str, value: Any, tmp_path: Path) -> None:
    """A line whose checksum is right, and whose values are not those of a journal."""
    lines = _written(tmp_path).splitlines(keepends=True)
    document = {**json.loads(lines[number].split(b" ", 1)[1]), field: value}
    lines[number] = _line(json.dumps(document))
    (tmp_path / JOURNAL).write_bytes(b"".join(lines))
    _shown(tmp_path)


@pytest.mark.parametrize(
    "document",
    [
        *("[]", "1", "null", '"text"', "{}", "", "nonsense", '{"event":"saved"}'),
        "[" * 100_000,
        *(f'{{"event":"saved","at_s":{one}}}' for one in ('"x"', "null")),
        '{"event":"durable","at_s":1,"step":1,"sent_bytes":"many","elapsed_s":1}',
        '{"event":"durable","at_s":1,"step":1.5}',
        '{"event":"remote","at_s":1,"remote":["/remote"]}',
    ],
)
def test_left_out_and_counted(
    document: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged line is left out, and one line on stderr says so."""
    text = _written(tmp_path)
    (tmp_path / JOURNAL).write_bytes(text + _line(document) + b"\xff\xfe\n")
    tiers(tmp_path, "table")
    shown = capsys.readouterr()
    assert shown.err == f"{tmp_path / JOURNAL}: 2 damaged lines left out\n"
    assert "/remote" in shown.out
    assert "no space left" in shown.out
    DrainJournal(tmp_path).shorten()
    assert tiers_status(tmp_path).damaged_lines == 0


def test_an_event_of_another_version(tmp_path: Path) -> None:
    """It is not damage, and changes nothing."""
    text = _written(tmp_path)
    before = tiers_status(tmp_path)
    event = '{"event":"moved","at_s":1,"step":1,"colour":"red"}'
    (tmp_path / JOURNAL).write_bytes(text + _line(event))
    found = tiers_status(tmp_path)
    assert found.damaged_lines == 0
    assert (found.remote_step, found.failure) == (before.remote_step, before.failure)


def test_a_line_without_its_end(tmp_path: Path) -> None:
    """The next event begins on a line of its own."""
    text = _written(tmp_path)
    (tmp_path / JOURNAL).write_bytes(text[:-1])
    journal = DrainJournal(tmp_path)
    journal.shorten()
    journal.add(_EVENTS[1])
    events, damaged = journal.read()
    assert (len(events), damaged) == (len(_EVENTS) + 1, 0)


@pytest.mark.parametrize(
    "plant",
    [
        *(Path.symlink_to, Path.hardlink_to),
        *(lambda path, _: os.mkfifo(path), lambda path, _: path.mkdir()),
    ],
)
def test_a_planted_name(plant: Any, tmp_path: Path) -> None:
    """Another user of a shared directory cannot let the trainer write to a file of its user."""
    victim, directory = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious\n")
    directory.mkdir()
    plant(directory / JOURNAL, victim)
    journal = DrainJournal(directory)
    for act in (journal.read, journal.shorten, lambda: journal.add(_EVENTS[0])):
        with pytest.raises((TargetError, OSError), match=r"is a link|not a regular file|directory"):
            act()
    assert victim.read_text() == "precious\n"
    with pytest.raises(IobenchError) as refused:
        tiers(directory, "table")
    assert len(str(refused.value).splitlines()) == 1


def test_a_link_in_place_of_the_new_journal(tmp_path: Path) -> None:
    """`shorten` writes a new file, and not where a link leads."""
    victim = tmp_path / "victim"
    victim.write_text("precious\n")
    text = _written(tmp_path)
    (tmp_path / JOURNAL).write_bytes(text + b"damaged\n")
    (tmp_path / f"{JOURNAL}.new").symlink_to(victim)
    DrainJournal(tmp_path).shorten()
    assert victim.read_text() == "precious\n"
    assert DrainJournal(tmp_path).read()[1] == 0
    assert not (tmp_path / JOURNAL).is_symlink()


def test_states_are_those_of_this_remote_tier(tmp_path: Path) -> None:
    """After a change of bucket, a checkpoint that was read back in the old one is not there."""
    journal = DrainJournal(tmp_path)
    for event in _EVENTS[:4]:
        journal.add(event)
    assert tiers_status(tmp_path).remote_step == 1
    journal.add(DrainEvent(event="remote", at_s=7.0, remote="/other"))
    found = tiers_status(tmp_path)
    assert found.remote == "/other"
    assert found.remote_step is None
