"""Records that somebody else wrote: with hostile texts, or broken."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HOSTILE = (
    "</script><script>hit = 1</script>",
    "{{ 7 * 7 }}{% for one in two %}",
    '" onmouseover="hit = 1" x="',
    "'><img src=x onerror=hit=1>",
    "\u2028\u2029\x00\x1b[2J",
    "javascript:hit=1",
    "datum.x); hit = 1; (",
    "<!--<script>",
    "${hit = 1}`]]>&lt;/script&gt;",
    "\ud800</style><svg onload=hit=1>",
)
"""Texts that run something where they are not escaped, or break what is around them."""

_KEPT = ("schema", "kind", "run_id", "operation", "status", "started_at", "finished_at", "counter")
"""What the reader checks."""


def hostile_record(source: Path, path: Path, text: str) -> Path:
    """Write the record `source` to `path`, with `text` after each text in it."""

    def hostile(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: value[k] if k in _KEPT else hostile(value[k]) for k in value}
        if isinstance(value, list):
            return [hostile(one) for one in value]
        return value + text if isinstance(value, str) else value

    lines = source.read_text().splitlines()
    path.write_text("".join(json.dumps(hostile(json.loads(line))) + "\n" for line in lines))
    return path


def _changed(line: str, **values: Any) -> str:
    return json.dumps(json.loads(line) | values)


BROKEN = (
    "empty",
    "not text",
    "not JSON",
    "cut short",
    "no header",
    "two headers",
    "another run",
    "a newer schema",
    "a missing key",
    "a wrong type",
    "an infinite time",
    "fewer samples than its end says",
)


def broken_record(source: Path, path: Path, how: str) -> Path:
    """Write the record `source` to `path`, broken in one of the ways of BROKEN."""
    lines = source.read_text().splitlines()
    first, second, *rest = lines
    broken: dict[str, Sequence[str]] = {
        "empty": [],
        "not text": ["\x00\x01\x02"],
        "not JSON": ["<html>"],
        "cut short": [*lines[:-1], lines[-1][:20]],
        "no header": [second, *rest],
        "two headers": [first, first, second, *rest],
        "another run": [first, _changed(second, run_id="0" * 16), *rest],
        "a newer schema": [_changed(first, schema="iobench.result/99"), second, *rest],
        "a missing key": [first, *_without(lines[1:], "elapsed_s")],
        "a wrong type": [first, _changed(second, bytes="many"), *rest],
        "an infinite time": [
            first,
            *(one.replace('"elapsed_s": ', '"elapsed_s": 1e999') for one in lines[1:]),
        ],
        "fewer samples than its end says": [first, *rest[:1], lines[-1]],
    }
    path.write_text("\n".join(broken[how]))
    return path


def _without(lines: Sequence[str], key: str) -> Iterator[str]:
    for line in lines:
        values = json.loads(line)
        values.pop(key, None)
        yield json.dumps(values)
