"""Records that somebody else wrote, with hostile texts."""

import json
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
