"""Records are equal after a round trip through JSON values; wrong values are named."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from iobench.environment import Machine, Storage
from iobench.results import (
    AxisValues,
    ResultFile,
    Sample,
    Setting,
    from_record,
    to_plain,
    to_record,
)
from iobench.results.codec import KINDS
from iobench.results.setting import AXES_IF_SET, AXIS_NAMES
from iobench.tune import journal as tune


def test_keys_that_a_newer_release_added_are_left_aside(example: ResultFile) -> None:
    values = to_record(example.samples[0])
    values["invented_later"] = 1
    values["device"]["invented_later"] = 1
    assert from_record(values) == example.samples[0]


def test_fields_with_defaults_may_be_absent(example: ResultFile) -> None:
    values = to_record(example.samples[0])
    for name in ("retries", "fallbacks", "decisions", "cold", "verified", "stores", "notes"):
        del values[name]
    assert from_record(values) == example.samples[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bytes": "many"}, "Expected `int`, got `str` - at `$.bytes`"),
        ({"bytes": True}, "Expected `int`, got `bool` - at `$.bytes`"),
        ({"bytes": 0}, "bytes and elapsed_s must be above zero"),
        ({"elapsed_s": 5e-324}, "bytes and elapsed_s must be above zero"),
        ({"elapsed_s": None}, "Expected `float`, got `null` - at `$.elapsed_s`"),
        ({"writer": 5}, "Expected `str`, got `int` - at `$.setting.writer`"),
        ({"notes": [1]}, "Expected `str`, got `int` - at `$.notes[0]`"),
        ({"operation": "erase"}, "Invalid enum value 'erase' - at `$.operation`"),
        ({"paths": {"direct": {"bytes": 1}}}, "missing required field `operations`"),
        ({"device": {}}, "missing required field `read_bytes` - at `$.device`"),
        ({"started_at": "yesterday"}, "started_at must be ISO 8601 with a time zone"),
        ({"started_at": "2026-01-31T12:00:00"}, "started_at must be ISO 8601 with a time zone"),
        (
            {"kind": ["run"]},
            "kind ['run'] is unknown; known are run, sample, ceiling, failure, train, end",
        ),
    ],
)
def test_a_wrong_value_is_named(
    example: ResultFile, changes: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_record(to_record(example.samples[0]) | changes)


def test_paths_tuples_and_read_only_mappings_become_plain() -> None:
    assert to_plain({"a": MappingProxyType({"b": (1, Path("c"))})}) == {"a": {"b": [1, "c"]}}


def test_what_json_cannot_hold_is_a_mistake_of_ours() -> None:
    with pytest.raises(TypeError, match="which a record cannot hold"):
        to_plain({"a": {1, 2}})


_ENVIRONMENT = to_plain({"machine": Machine(hostname="h"), "storage": Storage(fs_type="ext4")})
# As iobench wrote them when records still spelled out the axes; no byte of a record changes.
_RUN = (
    '{"schema": "iobench.result/1", "kind": "run", "run_id": "r", '
    '"started_at": "2026-01-01T00:00:00Z", "command": ["iobench"], "config_hash": "c", '
    '"environment": ' + json.dumps(_ENVIRONMENT) + ', "workload": {"name": "w", "rank": 0, '
    '"bytes": 1, "full_bytes": 1, "files": 1, "scaled": false, "scale": null, '
    '"restored_bytes": null}, "variants": [{"operation": "save", "format": "torch", '
    '"granularity": "blob", "restore_as": null, "numjobs": 2, "bytes": 2, "files": 2}], '
    '"plan": {}}'
)
_WHOSE = (
    '"run_id": "r", "repetition": 1, "order": 0, "writer": "odirect", '
    '"options": {"block_size": 4096}, "format": "torch", "granularity": "blob", '
    '"restore_as": "subset=0.1", "numjobs": 2, "operation": "restore", '
)
_SAMPLE = (
    f'{{"schema": "iobench.result/1", "kind": "sample", {_WHOSE}"bytes": 2, "elapsed_s": 0.5, '
    '"first_done_s": 0.25, "last_done_s": 0.5, "phases_s": {}, "paths": {}, "retries": 0, '
    '"fallbacks": [], "decisions": {}, "cpu_s": 0.0, "system_cpu_s": null, "cold": null, '
    '"device": null, "verified": null, "stored": null, "durable": true, "stores": true, '
    '"interference": null, "series": null, "notes": [], "started_at": "2026-01-01T00:00:00Z"}'
)
_FAILURE = (
    f'{{"schema": "iobench.result/1", "kind": "failure", {_WHOSE}"error": "OSError: gone", '
    '"started_at": "2026-01-01T00:00:00Z"}'
)


_CEILING = (
    '{"schema": "iobench.result/1", "kind": "ceiling", "run_id": "r", "repetition": 1, "order": 0, '
    '"job": {}, "operation": "save", "bytes": 2, "elapsed_s": 0.5, "cpu_s": null, "error": null}'
)


@pytest.mark.parametrize("line", [_RUN, _SAMPLE, _FAILURE])
def test_a_setting_is_written_as_keys_of_its_record(line: str) -> None:
    record = from_record(json.loads(line))
    assert json.dumps(to_record(record)) == line
    assert not isinstance(record, Sample) or record.setting == Setting(
        writer="odirect",
        options={"block_size": 4096},
        axes=AxisValues(format="torch", granularity="blob", restore_as="subset=0.1", numjobs=2),
    )


@pytest.mark.parametrize(
    ("line", "before", "added"),
    [
        (
            _RUN,
            '"endpoint": null}',
            f', "storages": {json.dumps({"/a": _ENVIRONMENT["storage"]})}',
        ),
        (_RUN, '"numjobs": 2', ', "target": "/b"'),
        (_SAMPLE, '"numjobs": 2', ', "target": "/b"'),
        (_FAILURE, '"numjobs": 2', ', "target": "/b"'),
        (_CEILING, '"order": 0', ', "target": "/b"'),
    ],
)
def test_only_a_run_of_several_targets_names_them(line: str, before: str, added: str) -> None:
    several = line.replace(before, before + added)
    for text in (line, several):
        assert json.dumps(to_record(from_record(json.loads(text)))) == text


def test_a_record_of_before_there_were_axes_still_loads(example: ResultFile) -> None:
    values = to_record(example.samples[0])
    for name in set(AXIS_NAMES) - set(AXES_IF_SET):
        del values[name]
    sample = from_record(values)
    assert isinstance(sample, Sample)
    assert sample.axes == AxisValues()
    with pytest.raises(ValueError, match="missing required field `writer`"):
        from_record({key: value for key, value in values.items() if key != "writer"})
    with pytest.raises(ValueError, match="numjobs must be at least 1, and is 0"):
        from_record(values | {"numjobs": 0})


_ROOT = Path(__file__).parents[3]
_KINDS = {"iobench.result/1": KINDS, "iobench.tune/1": tune.KINDS}


@pytest.mark.parametrize(
    "path",
    [
        *sorted((_ROOT / "results").glob("reference-*.jsonl")),
        _ROOT / "results" / "benchmarks" / "autotune-grid.jsonl",
        *sorted(Path(__file__).parent.glob("*.jsonl")),
    ],
    ids=lambda path: path.stem,
)
def test_every_published_record_is_read_and_written_as_it_is(path: Path) -> None:
    """Runs, trainings and tunings, of all versions so far: no field is lost or changed."""
    for line in path.read_text().splitlines():
        values = json.loads(line)
        record = from_record(values, _KINDS[values["schema"]])
        assert _lost(values, to_record(record, values["schema"])) == []


def _lost(old: Any, new: Any, where: str = "") -> list[str]:
    """The places below `old` whose value is not in `new`, which may have more fields.

    A null says nothing in a field that is gone.
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            place
            for name, value in old.items()
            if value is not None or name in new
            for place in _lost(value, new.get(name, ...), f"{where}.{name}")
        ]
    return [] if old == new else [where]
