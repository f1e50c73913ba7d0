"""The values of the argument `writer=` of every integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.errors import OptionError, UnknownNameError, UsageError
from iobench.integrations import default_writer
from iobench.integrations.default_writer import EXEC, chosen_writer
from iobench.writers.buffered import BufferedWriter
from iobench.writers.config import dump_writer
from iobench.writers.registry import make


def test_each_way_to_say_it(tmp_path: Path) -> None:
    """A Writer, a name, a name with options, a path; a comma in a path does not begin an option,
    and a slash in the value of an option (an endpoint) makes no path."""
    wanted = make("odirect", block_size="8MiB")
    config = tmp_path / "a,b.toml"
    config.write_text(dump_writer(wanted))
    for choice in (wanted, "odirect,block_size=8MiB", config, str(config)):
        assert chosen_writer(choice).options == wanted.options
    assert type(chosen_writer("buffered")) is BufferedWriter
    writer = chosen_writer("s3,endpoint_url=http://minio:9000")
    assert writer.options.to_dict()["endpoint_url"] == "http://minio:9000"


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        ("odirectt", UnknownNameError, "odirect"),
        ("odirect,block_siz=8MiB", UnknownNameError, "block_size"),
        ("odirect,block_size=many", OptionError, "many"),
        ("odirect,buffered", UsageError, "give exactly one"),
        ("null", UsageError, "stores nothing"),
    ],
)
def test_what_is_none(choice: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        chosen_writer(choice)


def test_after_exec_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its writer is gone; the initial default is used, with a warning."""
    monkeypatch.setattr(default_writer, "_default", None)
    monkeypatch.setenv(EXEC, str(tmp_path / "gone"))
    assert chosen_writer("buffered").name == "buffered"
    assert caplog.messages == []
    assert chosen_writer().name == "hybrid"
    assert "hybrid is used: iobench exec has ended" in caplog.text
