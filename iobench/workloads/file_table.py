"""FileTable: the specifications of many files, kept as text and numbers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import overload

from iobench.workloads.specs import FileFormat, FileSpec, TensorSpec

__all__ = ["FileTable"]


class FileTable(Sequence[FileSpec]):
    """The files of one rank, of which there may be 100,000. Each access makes a new FileSpec.

    A file of one tensor takes about 100 bytes here, and 400 bytes as objects.
    """

    def __init__(self, files: Iterable[FileSpec]) -> None:
        self.sizes = array("q")
        """`size_bytes` of each file."""
        text = bytearray()
        self._ends = array("I", [0])  # in the text, of each path and of the names that follow it
        self._first = array("I", [0])  # the number of each file's first tensor
        self._file_kinds, self._tensor_kinds = array("I"), array("I")
        formats: dict[tuple[FileFormat, bool], int] = {}
        shapes: dict[tuple[str, tuple[int, ...]], int] = {}

        def add(part: str) -> None:
            text.extend(part.encode("utf-8", "surrogatepass"))
            self._ends.append(len(text))

        for spec in files:
            add(spec.path)
            for tensor in spec.tensors:
                add(tensor.name)
                kind = shapes.setdefault((tensor.dtype, tensor.shape), len(shapes))
                self._tensor_kinds.append(kind)
            self._file_kinds.append(formats.setdefault((spec.format, spec.exact), len(formats)))
            self._first.append(len(self._tensor_kinds))
            self.sizes.append(spec.size_bytes)
        self._text = bytes(text)
        self._formats, self._shapes = list(formats), list(shapes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, index: int) -> FileSpec: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[FileSpec, ...]: ...
    def __getitem__(self, index: int | slice) -> FileSpec | tuple[FileSpec, ...]:
        number = range(len(self))[index]
        if isinstance(number, range):
            return tuple(map(self._spec, number))
        return self._spec(number)

    @property
    def formats(self) -> set[FileFormat]:
        """The formats of all files."""
        return {file_format for file_format, _ in self._formats}

    def path(self, number: int) -> str:
        """Return the path of one file."""
        return self._texts(number, 1)[0]

    def format(self, number: int) -> FileFormat:
        """Return the format of one file."""
        return self._formats[self._file_kinds[number]][0]

    def exact(self, number: int) -> bool:
        """Return whether the size of one file is exact."""
        return self._formats[self._file_kinds[number]][1]

    def _spec(self, number: int) -> FileSpec:
        kinds = self._tensor_kinds[self._first[number] : self._first[number + 1]]
        path, *names = self._texts(number, 1 + len(kinds))
        format_, exact = self._formats[self._file_kinds[number]]
        tensors = []
        for name, kind in zip(names, kinds, strict=True):
            dtype, shape = self._shapes[kind]
            tensors.append(TensorSpec(name=name, dtype=dtype, shape=shape))
        return FileSpec(
            path=path,
            format=format_,
            tensors=tuple(tensors),
            size_bytes=self.sizes[number],
            exact=exact,
        )

    def _texts(self, number: int, count: int) -> list[str]:
        """Return the path of a file and the names of its tensors, or the first `count` of them."""
        first = number + self._first[number]
        ends = self._ends[first : first + count + 1]
        return [
            self._text[start:stop].decode("utf-8", "surrogatepass")
            for start, stop in pairwise(ends)
        ]
