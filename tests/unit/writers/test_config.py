"""Writers by name and by file: loading returns what was dumped, invalid files are refused."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iobench.environment import describe_machine, machine_fingerprint
from iobench.errors import OptionError, TargetError, UnavailableError, UnknownNameError, UsageError
from iobench.integrations.default_writer import chosen_writer
from iobench.writers import config, registry
from iobench.writers.base import Availability, Writer
from iobench.writers.buffered import BufferedWriter
from iobench.writers.config import Tuned, dump_writer, load_writer, read_config
from iobench.writers.null import NullWriter
from iobench.writers.odirect import ODirectWriter
from iobench.writers.options import OptionInfo
from iobench.writers.s3 import S3Writer

TUNED = Tuned(
    date="2026-01-31T12:00:00Z",
    iobench="0.1.0",
    workload="llama7b, rank 0: 1 GiB of 75 GiB",
    objective="save",
    target="/nowhere",
    storage="ext4 on vda",
    machine="a machine, Linux 6.18",
    fingerprint="0" * 12,
    size_bytes=2**30,
    samples=7,
    median="2.45 GiB/s (2.63 GB/s)",
    interval="2.07 to 2.55",
    paths=("direct", "buffered"),
    finding='5.71 times as good as "buffered"\nand so on',
    baseline="buffered",
    ratio=5.71,
    ratio_interval=(1.3, 6.4),
    runner_up="uring",
    over_runner_up=1.01,
)
CLASSES = {name: registry.writer_class(name) for name in registry.names()}


@pytest.fixture(autouse=True)
def _forget_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_warned", set())


def _values(info: OptionInfo) -> st.SearchStrategy[Any]:
    if info.choices:
        return st.sampled_from(info.choices)
    if info.type is bool:
        return st.booleans()
    if info.type is int:
        step = info.multiple_of or 1
        low, high = int(info.low or 0), int(info.high or 2**40)
        return st.integers(-(-low // step), high // step).map(lambda n: n * step)
    if info.type is float:
        return st.floats(info.low, info.high, allow_nan=False)
    return st.text(max_size=20)


@st.composite
def writers(draw: st.DrawFn) -> Writer:
    cls = CLASSES[draw(st.sampled_from(sorted(CLASSES)))]
    values = {info.name: draw(_values(info)) for info in cls.Options.describe()}
    try:
        return cls(cls.Options(**values))
    except OptionError:  # options that exclude each other
        return cls()


@given(writer=writers(), tuned=st.sampled_from([None, TUNED]))
def test_what_is_written_is_loaded(
    writer: Writer, tuned: Tuned | None, tmp_path_factory: Any
) -> None:
    """Every writer at any setting, with and without provenance: equal options come back."""
    path = tmp_path_factory.mktemp("config") / "writer.toml"
    text = dump_writer(writer, tuned, file_format="torch", comment=["for people"])
    path.write_text(text, encoding="utf-8")
    with mock.patch.object(config, "machine_fingerprint", return_value=TUNED.fingerprint):
        loaded = load_writer(path)
    assert type(loaded) is type(writer)
    assert loaded.options == writer.options
    assert read_config(path).tuned == tuned
    assert read_config(path).format == "torch"


def test_a_path_with_invalid_utf_8(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 become question marks; the file can be read."""
    wrong = os.fsdecode(b"/mnt/\xff\xf0\x9f\x9a\x80")
    text = dump_writer(BufferedWriter(), replace(TUNED, target=wrong), comment=[wrong])
    tuned = read_config(_file(tmp_path, text)).tuned
    assert tuned is not None
    assert tuned.target == "/mnt/?\N{ROCKET}"


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "writer.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ('schema = "iobench.writer/1"\nwriter = "odirct"', UnknownNameError, "'odirect'"),
        (
            'schema = "iobench.writer/1"\nwriter = "odirect"\n[options]\nblok_size = 1',
            UnknownNameError,
            "did you mean 'block_size'",
        ),
        (
            'schema = "iobench.writer/1"\nwriter = "odirect"\n[options]\nthreads = 0',
            OptionError,
            "from 1 to 256",
        ),
        ('schema = "iobench.writer/1"\nwritter = "odirect"', UnknownNameError, "'writer'"),
        ('schema = "iobench.writer/1"', UsageError, "writer = NAME"),
        ('schema = "iobench.writer/1"\nwriter = "odirect"\noptions = 3', UsageError, "[options]"),
        ('schema = "iobench.writer/1"\nwriter = "null"\nformat = 3', UsageError, "format"),
        ('schema = "iobench.writer/2"\nwriter = "odirect"\nnew = 1', UsageError, "upgrade"),
        ('schema = "iobench.result/1"\nwriter = "odirect"', UsageError, "iobench.writer/1"),
        ('writer = "odirect"', UsageError, "schema is None"),
        ("writer = ", UsageError, "is not TOML"),
        ("writer = " + "[" * 5000, UsageError, "is not TOML"),
        ("writer = " + "9" * 5000, UsageError, "is not TOML"),
        (f'schema = "iobench.writer/{"9" * 5000}"', UsageError, "schema is 'iobench.writer/999"),
        (
            'schema = "iobench.writer/1"\nwriter = "null"\n[tuned]\nmachin = "x"',
            UnknownNameError,
            "'machine'",
        ),
        ('schema = "iobench.writer/1"\nwriter = "null"\n[tuned]', OptionError, "`date`"),
        (
            dump_writer(BufferedWriter(), replace(TUNED, samples="seven")),
            OptionError,
            "Expected `int`, got `str` - at `$.samples`",
        ),
    ],
)
def test_an_invalid_file(tmp_path: Path, text: str, kind: type, words: str) -> None:
    """A typo, a newer schema, another file: one line that names the file and what to do."""
    path = _file(tmp_path, text)
    with pytest.raises(kind) as caught:
        load_writer(path)
    message = str(caught.value)
    assert words in message
    assert str(path) in message
    assert "\n" not in message


_GOOD = dump_writer(BufferedWriter(), TUNED)
_PIECES = st.sampled_from([*"=\n[]'\"1-{,", "nan", "1e400", "2000-01-32", "[[x]]", "true"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(_GOOD)), cut=st.integers(0, 9), pieces=st.lists(_PIECES, max_size=3))
def test_a_damaged_file(at: int, cut: int, pieces: list[str], tmp_path: Path) -> None:
    """It is read, or refused with a UsageError that names the file."""
    path = _file(tmp_path, _GOOD[:at] + "".join(pieces) + _GOOD[at + cut :])
    try:
        read_config(path)
    except UsageError as error:
        message = str(error)
    else:
        return
    assert str(path) in message


def test_overrides(tmp_path: Path) -> None:
    """Options in the call replace those of the file; unknown ones are refused."""
    path = _file(tmp_path, dump_writer(ODirectWriter(threads=2, block_size="1MiB")))
    loaded = load_writer(path, threads=3)
    assert loaded.options == ODirectWriter.Options(threads=3, block_size="1MiB")
    with pytest.raises(UnknownNameError, match="did you mean 'threads'"):
        load_writer(path, thread=3)


@pytest.mark.parametrize("read", [load_writer, chosen_writer], ids=["load_writer", "chosen"])
def test_texts(read: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name or a file, each with or without options, is read alike by all functions."""
    monkeypatch.chdir(tmp_path)
    text = dump_writer(ODirectWriter(threads=2, block_size="1MiB"))
    for name in ("writer.toml", "plain", "a,b.toml"):
        Path(name).write_text(text)
    wanted = ODirectWriter.Options(threads=2, block_size="1MiB")
    for found in ("writer.toml", "./writer.toml", "./plain", "a,b.toml", Path("plain")):
        assert read(found).options == wanted
    for found in ("writer.toml, threads=3", f"{tmp_path}/plain,threads=3"):
        assert read(found).options == replace(wanted, threads=3)
    assert read("odirect,block_size=8MiB,threads=7").options == ODirectWriter.Options(
        block_size="8MiB", threads=7
    )
    url = "http://127.0.0.1:9000/x.toml"
    for found in (f"s3,endpoint_url={url}", f"s3,threads=2,endpoint_url={url}"):
        made = read(found)
        assert isinstance(made, S3Writer)
        assert made.options.endpoint_url == url


@pytest.mark.parametrize("read", [load_writer, chosen_writer], ids=["load_writer", "chosen"])
def test_texts_refused(read: Callable, tmp_path: Path) -> None:
    for text, message in {
        "odirect,buffered": "names 2 writers; give exactly one",
        "none.toml,threads=2": r"^none\.toml: no such file",
        f"{tmp_path}/none,threads=2": "none: no such file",
    }.items():
        with pytest.raises(UsageError, match=message):
            read(text)
    with pytest.raises(UsageError, match="odirect: no such file"):
        read(Path("odirect"))


class Refusing(BufferedWriter):
    """A writer that is unavailable everywhere."""

    name = "refusing"

    def available(self, target: str | Path = ".") -> Availability:
        return Availability(ok=False, reason="there is no such device.", remedy="Buy one.")


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry._WRITERS.find
    monkeypatch.setattr(
        registry._WRITERS, "find", lambda name: Refusing if name == "refusing" else known(name)
    )


@pytest.mark.usefixtures("refusing")
def test_an_unavailable_writer_raises_with_the_remedy(tmp_path: Path) -> None:
    """It is tried in the given target, or in the tuned one. An answer is true if it works."""
    assert load_writer("buffered").available(tmp_path)
    assert not load_writer("refusing").available(tmp_path)
    with pytest.raises(UnavailableError, match=r"no such device\. Buy one\."):
        load_writer("refusing", target=tmp_path)
    here = replace(TUNED, target=str(tmp_path), fingerprint=machine_fingerprint())
    path = _file(tmp_path, dump_writer(Refusing(), here))
    with pytest.raises(UnavailableError, match=r"Buy one\."):
        load_writer(path)


def test_a_missing_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like a missing directory: the writer is tried only in a target that is given."""

    def require(_: S3Writer, target: str | Path) -> None:
        raise TargetError(f"{target}: no such bucket")

    monkeypatch.setattr(S3Writer, "require", require)
    tuned = replace(TUNED, target="s3://gone/x", fingerprint=machine_fingerprint())
    path = _file(tmp_path, dump_writer(S3Writer(threads=3), tuned))
    assert load_writer(path).options == S3Writer.Options(threads=3)
    with pytest.raises(TargetError, match="no such bucket"):
        load_writer(path, target="s3://gone/y")


def test_another_machine_warns_once(tmp_path: Path) -> None:
    """Only the first load of a file from another machine warns."""
    path = _file(tmp_path, dump_writer(BufferedWriter(), TUNED))
    with pytest.warns(RuntimeWarning, match="tuned on another machine"):
        load_writer(path)
    load_writer(path)  # warnings are errors here
    own = replace(TUNED, fingerprint=machine_fingerprint())
    load_writer(_file(tmp_path, dump_writer(BufferedWriter(), own)))


def test_the_quick_fingerprint_is_the_machines() -> None:
    """The one that loading computes is the one that tuning writes down."""
    assert machine_fingerprint() == describe_machine().fingerprint


def test_the_file_is_readable() -> None:
    """Plain TOML, sizes such as 16MiB, the comment at the top."""
    text = dump_writer(ODirectWriter(), TUNED, comment=["fast"])
    assert text.startswith("# fast\nschema = ")
    document = tomllib.loads(text)
    assert document["options"] == {"block_size": "8MiB", "threads": 4, "fallocate": True}
    assert document["tuned"]["ratio_interval"] == [1.3, 6.4]


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
