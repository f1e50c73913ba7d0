"""Files with right checksums and content that no save writes: damage, and nothing else.

Anyone who can write into the directory or the bucket can make such files, and so can a program of
another version. A load must go on to an older checkpoint, and must not touch other files.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import iobench
from iobench.checkpoint.checksums import record_of
from iobench.checkpoint.manifest import FileRecord, Manifest, Piece, PinnedGeneration
from iobench.checkpoint.stored import disjoint, stored_state
from iobench.errors import DataMismatchError, IobenchError
from iobench.writers.base import StoredReader
from iobench.writers.buffered import BufferedWriter
from iobench.writers.image import FileImage

_STATE = {
    "w": torch.arange(12.0).reshape(3, 4),
    "odd": [1, 2.5, float("inf"), "text", None, b"bytes", (1, torch.ones(2, dtype=torch.int8))],
    "array": np.arange(5),
    7: {"nested": [{"deep": torch.zeros(3)}]},
}
_TENSOR = np.arange(24, dtype=np.float32)
_INDEX = {
    "skeleton": {"w": {"$tensor": "w"}, "n": 5, "own": {"$per_rank": [1]}},
    "tensors": {
        "w": {
            "dtype": "float32",
            "shape": [4, 6],
            "chunks": [[0, 0, 0, [0, 0], [2, 6]], [0, 1, 0, [2, 0], [2, 6]]],
        }
    },
}


def _publish(directory: Path, files: dict[str, bytes | tuple[bytes, ...]], **fields: Any) -> None:
    """Write a checkpoint with these files; several parts of a file are its pieces."""
    directory.mkdir(exist_ok=True)
    records = []
    for name, content in files.items():
        parts = content if isinstance(content, tuple) else (content,)
        data = b"".join(parts)
        (directory / name).write_bytes(data)
        pieces = [(f"piece {number}", len(part)) for number, part in enumerate(parts)]
        records.append(record_of(FileImage.of(name, [np.frombuffer(data, np.uint8)]), pieces))
    manifest = Manifest(
        created_s=1.0,
        world_size=1,
        iobench="0",
        writer={},
        files=tuple(records),
        **fields,
    )
    (directory / "manifest.json").write_bytes(manifest.to_json())


def _publish_index(runs: Path, index: bytes) -> None:
    """Write step 2 like a job of ranks, with this index."""
    halves = _TENSOR[:12].tobytes(), _TENSOR[12:].tobytes()
    files = {"__0_0.distcp": halves, "state.json": index}
    _publish(runs / "step-2", files, step=2, format="dcp", serial=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a whole step 1; step 2 is written by the tests."""
    made = tmp_path_factory.mktemp("runs")
    with iobench.Checkpointer(made) as ckpt:
        ckpt.save(_STATE, 1)
        ckpt.save(_STATE, 2)
    return made


@pytest.fixture(scope="module")
def own_files(runs: Path) -> dict[str, bytes]:
    """The files of step 2 as they were saved."""
    names = ("state.json", "tensors.safetensors")
    return {name: (runs / "step-2" / name).read_bytes() for name in names}


def _expect_the_older_one(runs: Path) -> DataMismatchError:
    """Step 2 is damaged, with the name of the file; step 1 is loaded on request."""
    with pytest.raises(DataMismatchError, match=r"step-2/state\.json") as caught:
        iobench.load_checkpoint(runs)
    with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
        state = iobench.load_checkpoint(runs, on_corrupt="previous")
    assert torch.equal(state["w"], _STATE["w"])
    return caught.value


_DEEP = b"[" * 100_000 + b"]" * 100_000
_BAD = {
    "empty": b"",
    "deep": _DEEP,
    "deep dicts": b'{"a":' * 3000 + b"1" + b"}" * 3000,
    "no JSON": b"\xff\x00",
    "a list": b"[1",
    "a tag": b'{"$no such": 1}',
    "no such tensor": b'{"$tensor": "v"}',
    "an endless number": b'{"$complex": ["1e999999", 1, 2]}',
    "an empty tag": b'{"$tuple": 5}',
    "a size": b'{"$size": ["x"]}',
    "an empty number": b'{"$number": "", "dtype": "float32"}',
    "no names": b'{"$tensors": []}',
    "a number of names": b'{"$tensors": 3}',
    "names without a tensor": b'{"$tensors": ["", "unknown"]}',
    "a name that is a number": b'{"$tensors": ["", 5]}',
    "a prefix that is a list": b'{"$tensors": [[], ["w"]]}',
    "ordered names without a tensor": b'{"$ordered": {"$tensors": ["", "unknown"]}}',
    "an unknown dtype": b'{"$array": "array", "dtype": "no dtype", "shape": [1]}',
    "a view beyond its tensor": b'{"$tensor": "w", "dtype": "float32", "shape": [19],'
    b' "stride": [1], "offset": 0}',
    "a float": b'{"$float": "x"}',
}


@pytest.mark.parametrize("name", _BAD)
def test_bad_skeletons(runs: Path, own_files: dict[str, bytes], name: str) -> None:
    """Of one process."""
    files = {**own_files, "state.json": _BAD[name]}
    _publish(runs / "step-2", files, step=2, format="safetensors", serial=2)
    _expect_the_older_one(runs)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (b"", "state.json"),
        (_DEEP, "state.json"),
        (b'{"skeleton": ' + _DEEP + b', "tensors": {}}', "state.json"),
        (b"{}", "state.json"),
        ({"chunks": []}, "0 elements"),
        ({"shape": [2**40, 2**40]}, "elements"),
        ({"shape": [-4, 6]}, "shape"),
        ({"dtype": "float999"}, "float999"),
        ({"chunks": [[0, 0, 0, [0], [4]]]}, "not a part"),
        ({"chunks": [[-1, 0, 0, [0, 0], [4, 6]]]}, ">= 0"),
        ({"chunks": [[0, 7, 0, [0, 0], [4, 6]]]}, "IndexError"),
        ({"chunks": [[0, 0, 1, [0, 0], [2, 6]], [0, 1, 0, [2, 0], [2, 6]]]}, "not a part"),
    ],
)
def test_bad_indexes(runs: Path, change: Any, told: str) -> None:
    """Of several ranks."""
    if isinstance(change, dict):
        tensors = {"w": {**_INDEX["tensors"]["w"], **change}}
        change = json.dumps({**_INDEX, "tensors": tensors}).encode()
    _publish_index(runs, change)
    assert told in str(_expect_the_older_one(runs))


def test_no_pieces(runs: Path, own_files: dict[str, bytes]) -> None:
    """A load of several ranks compares the header with the first of them."""
    _publish(runs / "step-2", {**own_files}, step=2, format="safetensors", serial=2)
    manifest = Manifest.parse((runs / "step-2" / "manifest.json").read_bytes(), "m")
    files = [
        replace(one, pieces=()) if one.path == "tensors.safetensors" else one
        for one in manifest.files
    ]
    with pytest.raises(DataMismatchError, match="the checksum of its header differs"):
        stored_state(
            StoredReader(BufferedWriter(), runs / "step-2"), replace(manifest, files=tuple(files))
        )


def test_chunks_that_overlap(runs: Path) -> None:
    """They have as many elements as the tensor and leave a gap: memory that nothing has filled."""
    chunks = [[0, 0, 0, [0, 0], [2, 6]], [0, 1, 0, [1, 0], [2, 6]]]
    tensors = {"w": {**_INDEX["tensors"]["w"], "chunks": chunks}}
    _publish_index(runs, json.dumps({**_INDEX, "tensors": tensors}).encode())
    with pytest.raises(DataMismatchError, match="do not cover it, each element once"):
        iobench.load_checkpoint(runs)


_CUTS = st.lists(st.integers(1, 20), min_size=1, max_size=4)


@given(_CUTS, _CUTS, st.data())
def test_disjoint(rows: list[int], columns: list[int], data: st.DataObject) -> None:
    """A grid of boxes is disjoint in any order; one that is moved by one element is not."""
    at, grid = 0, []
    for row in rows:
        across = 0
        for column in columns:
            grid.append(((at, at + row), (across, across + column)))
            across += column
        at += row
    grid = data.draw(st.permutations(grid))
    assert disjoint(grid)
    assert disjoint([])
    if len(grid) > 1:
        (begin, end), other = grid[0]
        moved = ((begin - 1, end), other) if begin else ((begin, end + 1), other)
        neighbours = sum(one[1] == other for one in grid) > 1
        assert disjoint([moved, *grid[1:]]) is not neighbours
        assert not disjoint([*grid, grid[0]])
    assert not disjoint([(), ()])


_WORDS = (
    *("$tensor", "$tensors", "$array", "$per_rank", "$dict", "$ordered", "$tuple", "$size"),
    *("$float", "$bytes", "$complex", "$dtype", "$device", "$number"),
    *("dtype", "shape", "stride", "offset", "attributes"),
)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["w", "$tensor", "$array", "float32", "step-1", "../x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(_WORDS),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from _places(item, (*at, key))


def _changed(document: Any, data: st.DataObject) -> Any:
    """Return a copy in which one value is another one, or is missing."""
    made = json.loads(json.dumps(document))
    place = data.draw(st.sampled_from(list(_places(made))))
    value = data.draw(_JSON)
    if not place:
        return value
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    if data.draw(st.booleans()):
        inner[place[-1]] = value
    else:
        del inner[place[-1]]
    return made


def _loads(runs: Path) -> None:
    """Load: only errors of iobench, and no warning of a library."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(IobenchError):
            iobench.load_checkpoint(runs)
        iobench.load_checkpoint(runs, on_corrupt="previous")


@pytest.mark.slow
@settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.data(), st.sampled_from(["skeleton", "index", "manifest"]))
def test_any_document(
    runs: Path, own_files: dict[str, bytes], data: st.DataObject, kind: str
) -> None:
    """Of one process or of several ranks, and a manifest with a right checksum: restored, or
    damage."""
    if kind == "index":
        _publish_index(runs, json.dumps(_changed(_INDEX, data)).encode())
    else:
        files = {**own_files}
        if kind == "skeleton":
            skeleton = _changed(json.loads(own_files["state.json"]), data)
            files["state.json"] = json.dumps(skeleton).encode()
        _publish(runs / "step-2", files, step=2, format="safetensors", serial=2)
    if kind == "manifest":
        path = runs / "step-2" / "manifest.json"
        document = json.loads(path.read_bytes())
        del document["xxh3_64"]
        changed = _changed(document, data)
        signed = _signed(changed) if isinstance(changed, dict) else json.dumps(changed).encode()
        path.write_bytes(signed)
    _loads(runs)


def _signed(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":")).encode()
    digest = xxhash.xxh3_64_hexdigest(text)
    return text[:-1] + f',"xxh3_64":"{digest}"}}'.encode()


_RECORD = FileRecord(path="file", size_bytes=1, pieces=(Piece("", 1, "0" * 16),))
_MANIFEST = Manifest(
    step=2, created_s=1.0, world_size=1, iobench="0", writer={}, format="dcp", files=(_RECORD,)
)
_PATHS = ["", "/", "/etc/passwd", "..", "../x", "a/../../x", "a//b", "./a", "a/", "a/.", "a\0b"]


@pytest.mark.parametrize("path", _PATHS)
@pytest.mark.parametrize("pinned", [False, True])
def test_paths_that_lead_out_of_the_checkpoint(path: str, pinned: bool) -> None:
    """A manifest with one is damaged, also in the list of an optimizer's files."""
    with pytest.raises(ValueError, match="must be relative"):
        replace(_RECORD, path=path)
    good = PinnedGeneration(directory="d", pin="p", generation=1, updates=1, files=(_RECORD,))
    made = replace(_MANIFEST, files=(), offload=good) if pinned else _MANIFEST
    text = made.to_json().replace(b'"path":"file"', f'"path":{json.dumps(path)}'.encode())
    document = json.loads(text)
    del document["xxh3_64"]
    with pytest.raises(DataMismatchError, match=r"m: not the manifest of a checkpoint.*path"):
        Manifest.parse(_signed(document), "m")


@pytest.mark.parametrize("names", [("a", "a"), ("manifest.json",)])
def test_two_files_of_one_name(names: tuple[str, ...]) -> None:
    """Also one that would be written over the manifest."""
    with pytest.raises(ValueError, match="one file of this name"):
        replace(_MANIFEST, files=tuple(replace(_RECORD, path=name) for name in names))
