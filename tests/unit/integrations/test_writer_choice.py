"""What the argument `writer=` of every integration may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from iobench.errors import OptionError, UnknownNameError, UsageError
from iobench.integrations.default_writer import chosen_writer
from iobench.writers.buffered import BufferedWriter
from iobench.writers.config import dump_writer
from iobench.writers.registry import make


def test_each_way_to_say_it(tmp_path: Path) -> None:
    """A Writer, a name, a name with options, a path; a comma in a path is no option."""
    wanted = make("odirect", block_size="8MiB")
    config = tmp_path / "a,b.toml"
    config.write_text(dump_writer(wanted))
    for choice in (wanted, "odirect,block_size=8MiB", config, str(config)):
        assert chosen_writer(choice).options == wanted.options
    assert type(chosen_writer("buffered")) is BufferedWriter


@pytest.mark.parametrize(
    ("choice", "error", "says"),
    [
        ("odirectt", UnknownNameError, "odirect"),
        ("odirect,block_siz=8MiB", UnknownNameError, "block_size"),
        ("odirect,block_size=many", OptionError, "many"),
        ("odirect,buffered", UsageError, "one is wanted"),
        ("null", UsageError, "keeps nothing"),
    ],
)
def test_what_is_none(choice: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        chosen_writer(choice)
