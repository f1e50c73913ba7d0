"""The registry: writers by name, and the syntax of `--writer`."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from iobench.errors import OptionError, UnavailableError, UnknownNameError, UsageError
from iobench.writers import registry
from iobench.writers.base import Writer
from iobench.writers.null import NullWriter


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, EntryPoint]]:
    """The registered entry points; a test may add some."""
    entries = dict(registry._WRITERS.entries)
    monkeypatch.setattr(registry._WRITERS, "entries", entries)
    return entries


def _entry(value: str) -> EntryPoint:
    return EntryPoint(name="other", value=value, group=registry.GROUP)


@pytest.mark.parametrize("name", registry.names())
def test_names_agree(name: str) -> None:
    """A writer is registered under its own `name`, and has a summary."""
    cls = registry.writer_class(name)
    assert cls.name == name
    assert cls.summary


def test_third_party_writers_are_found(registered: dict[str, EntryPoint]) -> None:
    """A writer of another package is made by its name."""
    registered["other"] = _entry("iobench.writers.null:NullWriter")
    assert isinstance(registry.make("other"), NullWriter)
    assert "other" in registry.names()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_package.writer:Writer", "No module named 'no_such_package'"),
        ("iobench.writers.null:NoSuchWriter", "NoSuchWriter"),
        ("iobench.writers.null:NullOptions", "is not a Writer"),
        ("iobench.units:parse_size", "is not a Writer"),
    ],
)
def test_broken_registrations(value: str, reason: str, registered: dict[str, EntryPoint]) -> None:
    """A writer that cannot be loaded is unavailable, with the reason, and stays listed."""
    registered["other"] = _entry(value)
    with pytest.raises(UnavailableError) as caught:
        registry.writer_class("other")
    assert reason in str(caught.value)
    assert "other" in registry.names()


def _make_all(text: str) -> list[Writer]:
    return [registry.make(name, **values) for name, values in registry.split_specs(text)]


def test_specs() -> None:
    """A token with `=` belongs to the writer before it; spaces do not matter."""
    writers = _make_all("odirect,threads=3,block_size=4MiB, buffered ,odirect, threads = 1")
    assert [writer.name for writer in writers] == ["odirect", "buffered", "odirect"]
    assert [getattr(writer.options, "threads", None) for writer in writers] == [3, 1, 1]
    assert writers[0].options.to_dict()["block_size"] == 4 << 20


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("", UsageError, "an empty name"),
        ("odirect,", UsageError, "an empty name"),
        ("odirect,,null", UsageError, "an empty name"),
        ("threads=3", UsageError, "'threads=3' has no writer before it"),
        ("odirect,threads", UsageError, "option 'threads' has no value; write threads=..."),
        ("odirect,nosuch", UnknownNameError, "unknown writer 'nosuch'. Known: "),
        ("odirct", UnknownNameError, "did you mean 'odirect'"),
        ("odirect,thread=3", UnknownNameError, "did you mean 'threads'"),
        ("odirect,name=3", UnknownNameError, "unknown option 'name'"),
        ("odirect,options=3", UnknownNameError, "unknown option 'options'"),
        ("odirect,=3", UnknownNameError, "unknown option ''"),
        ("odirect,threads=", OptionError, "threads="),
        ("odirect,threads=0", OptionError, "from 1 to 256"),
        ("odirect,block_size=5000", OptionError, "a multiple of 4KiB"),
        ("odirect,threads=1,threads=2", UsageError, "'threads' twice for odirect"),
    ],
)
def test_specs_refused(text: str, kind: type[Exception], message: str) -> None:
    """Each mistake is refused with a message that names it."""
    with pytest.raises(kind) as caught:
        _make_all(text)
    assert message in str(caught.value)
