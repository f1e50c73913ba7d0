"""FileTable: the same specifications as the objects, in a fraction of the memory."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iobench.workloads.file_table import FileTable
from iobench.workloads.specs import FileSpec, TensorSpec

_NAMES = st.text(max_size=9)  # with characters of one to four bytes
_TENSORS = st.builds(
    TensorSpec,
    name=_NAMES,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
_FILES = st.builds(
    FileSpec,
    path=_NAMES,
    format=st.sampled_from(["safetensors", "torch", "raw"]),
    tensors=st.lists(_TENSORS, max_size=4).map(tuple),
    size_bytes=st.integers(0, 2**62),
    exact=st.booleans(),
)


@given(st.lists(_FILES, max_size=6))
def test_every_file_is_as_it_was_given(files: list[FileSpec]) -> None:
    """By iteration, number and slice, also after it was sent to another process."""
    for table in (FileTable(files), pickle.loads(pickle.dumps(FileTable(files)))):
        assert list(table) == files
        assert len(table) == len(files)
        assert table[1:-1] == tuple(files[1:-1])
        assert [table[number - len(files)] for number in range(len(files))] == files
        assert list(table.sizes) == [file.size_bytes for file in files]
        assert table.formats == {file.format for file in files}
        for number, file in enumerate(files):
            found = table.path(number), table.format(number), table.exact(number)
            assert found == (file.path, file.format, file.exact)
        with pytest.raises(IndexError):
            table[len(files)]


def test_memory_of_many_files() -> None:
    """About 120 bytes for a file of one tensor; objects take 400."""
    count = 5000

    def one(number: int) -> FileSpec:
        name = f"layers.{number:05}.attention.q_proj.weight"
        tensor = TensorSpec(name=name, dtype="float32", shape=(16, 16))
        path = f"tensor-{number:05}.safetensors"
        return FileSpec(
            path=path, format="safetensors", tensors=(tensor,), size_bytes=1024, exact=True
        )

    tracemalloc.start()
    try:
        table = FileTable(map(one, range(count)))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == count
    assert taken < 160 * count
