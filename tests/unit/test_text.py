"""Text of unknown origin: it has no effect on a terminal, and is valid text."""

from __future__ import annotations

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.text import parse_json, printable


@given(st.text())
def test_printable(text: str) -> None:
    """Printed text can be encoded, is one line and has no control characters; plain text is
    unchanged."""
    shown = printable(text)
    assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cs"}
    assert shown.encode().decode() == shown
    assert printable(shown) == shown


def test_what_is_escaped() -> None:
    """Control characters become Python escapes; letters of all scripts stay."""
    assert printable("a\x1b[2Jb\x9b\u202ec\ud800\n") == r"a\x1b[2Jb\x9b\u202ec\ud800\n"
    assert printable("µs, Straße, 日本 → ok") == "µs, Straße, 日本 → ok"


@pytest.mark.parametrize(
    "data",
    [b'"\xed\xa0\x80"', rb'"\ud800"', rb'{"\uDFFF":1}', '{"a":1}'.encode("utf-16"), b"\xff", b""],
)
def test_json_that_is_not_text(data: bytes) -> None:
    """Lone surrogates, other encodings, and what is not JSON."""
    with pytest.raises(ValueError, match=r"codec|Expecting"):
        parse_json(data)


@pytest.mark.slow
@given(st.recursive(st.none() | st.integers() | st.text(st.characters(codec="utf-8")), st.lists))
def test_json_that_is_text(value: object) -> None:
    """Escaped or not, it is unchanged after a round trip."""
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value
