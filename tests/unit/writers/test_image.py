"""FileImage: views, gather and scatter, and what the constructor refuses."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from iobench.errors import UsageError
from iobench.formats.many_parts import ScatteredImage
from iobench.writers.image import FileImage, Segment

_PIECES = st.lists(st.binary(max_size=40), max_size=12)


def _range(data: st.DataObject, size: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, size))
    return start, data.draw(st.integers(start, size))


@given(_PIECES, st.data())
def test_views_equal_the_concatenation(pieces: list[bytes], data: st.DataObject) -> None:
    """The views of [start, stop) are that slice of all pieces one after another, none empty."""
    image, whole = FileImage.of("f", pieces), b"".join(pieces)
    start, stop = _range(data, len(whole))
    views = image.views(start, stop)
    assert b"".join(view.tobytes() for view in views) == whole[start:stop]
    assert all(len(view) for view in views)
    assert image.size_bytes == len(whole)


@given(_PIECES, st.data())
def test_scatter_fills_only_its_range(pieces: list[bytes], data: st.DataObject) -> None:
    """scatter copies the block to [start, stop) of the memories and changes no other byte."""
    memories = [bytearray(piece) for piece in pieces]
    image, whole = FileImage.of("f", memories), bytearray(b"".join(pieces))
    start, stop = _range(data, len(whole))
    block = np.frombuffer(
        data.draw(st.binary(min_size=stop - start, max_size=stop - start + 3)), dtype=np.uint8
    )
    assert image.scatter(start, stop, block) == stop - start
    whole[start:stop] = block[: stop - start].tobytes()
    assert b"".join(memories) == whole


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 11), (11, 11)])
def test_ranges_outside_are_refused(start: int, stop: int) -> None:
    """Bytes outside the image have no view; a negative start does not count from the end."""
    with pytest.raises(IndexError, match="of an image of 10 bytes"):
        FileImage.of("f", [bytes(10)]).views(start, stop)


@pytest.mark.parametrize("path", ["", "/etc/passwd", "..", "../up", "a/../../b", "a/.."])
def test_paths_that_leave_the_target_are_refused(path: str) -> None:
    """An image's path is relative and stays below its target; the message shows it."""
    with pytest.raises(UsageError) as caught:
        FileImage.of(path, [])
    assert repr(path) in str(caught.value)


@pytest.mark.parametrize(("offset", "length"), [(1, 3), (0, 2), (0, 4), (-1, 3)])
def test_gaps_and_overlaps_are_refused(offset: int, length: int) -> None:
    """Segments follow one another without a gap, and are as long as their memory."""
    memory = np.zeros(3, dtype=np.uint8)
    with pytest.raises(UsageError, match="does not continue at 0"):
        FileImage(path="f", segments=(Segment(offset=offset, length=length, memory=memory),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (), (0, 4)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The image has the memory of a tensor itself, of any dtype and shape, also of a parameter."""
    tensor = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    image = FileImage.of("f", [b"head", tensor])
    assert image.size_bytes == 4 + tensor.numel() * dtype.itemsize
    for view in image.views(4, image.size_bytes):
        view[:] = 1
    assert bool((tensor.reshape(-1).view(torch.uint8) == 1).all())


def test_a_parameter_that_is_trained() -> None:
    """Its values can be read into: the image is of the detached tensor."""
    tensor = torch.nn.Parameter(torch.ones(2))
    FileImage.of("f", [tensor]).views(0, 8)[0][:] = 0
    assert tensor.tolist() == [0, 0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3).T,
        torch.ones(1).expand(6),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(6, dtype=torch.complex64).conj().imag,
        torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
)
def test_tensors_that_would_be_copied_are_refused(tensor: torch.Tensor) -> None:
    """A read would fill the copy, and the tensor would keep its values."""
    with pytest.raises(UsageError, match=r"contiguous copy first|to_dense"):
        FileImage.of("f", [tensor])


def test_memory_with_holes_is_refused() -> None:
    """Memory that is not contiguous would have to be copied, so it is refused."""
    for memory in (
        np.zeros(10, dtype=np.uint8)[::2],
        memoryview(bytes(10))[::2],
        np.zeros((4, 4))[:, 1],
    ):
        with pytest.raises(UsageError, match="contiguous"):
            FileImage.of("f", [memory])


def test_a_zero_length_segment_by_hand() -> None:
    """Segments of 0 bytes made by the caller do not disturb the search."""
    empty, one = np.zeros(0, dtype=np.uint8), np.array([7], dtype=np.uint8)
    lengths = (0, 1, 0, 0, 1, 0)
    segments, offset = [], 0
    for length in lengths:
        memory = one if length else empty
        segments.append(Segment(offset=offset, length=length, memory=memory))
        offset += length
    image = FileImage(path="f", segments=tuple(segments))
    for start, stop in ((0, 1), (1, 2), (0, 2), (2, 2)):
        found = b"".join(view.tobytes() for view in image.views(start, stop))
        assert found == b"\x07" * (stop - start)


@given(st.data())
def test_a_scattered_image_is_like_one_of_views(data: st.DataObject) -> None:
    """Its bytes, its segments and what it gathers are those of an image of the same memory."""
    pool = np.arange(200, dtype=np.uint8)
    places = data.draw(
        st.lists(st.tuples(st.integers(0, 150), st.integers(1, 50)), min_size=1, max_size=8)
    )
    memories = [pool[begin : begin + length] for begin, length in places]
    plain = FileImage.of("f", memories)
    scattered = ScatteredImage(
        "f",
        starts=[segment.offset for segment in plain.segments],
        addresses=np.array([memory.ctypes.data for memory in memories]),
        lengths=np.array([len(memory) for memory in memories]),
        owners=pool,
    )
    assert scattered.size_bytes == plain.size_bytes
    start, stop = _range(data, plain.size_bytes)
    for image in (plain, scattered):
        block = np.zeros(plain.size_bytes, dtype=np.uint8)
        assert image.gather(start, stop, block) == stop - start
        assert block[: stop - start].tobytes() == b"".join(map(bytes, memories))[start:stop]
        assert not block[stop - start :].any()
        if start < stop:
            assert image.in_one_piece(start, stop) == (len(image.views(start, stop)) == 1)
    assert [bytes(one.memory) for one in scattered.segments] == [bytes(one) for one in memories]
    assert [one.offset for one in scattered.segments] == [one.offset for one in plain.segments]
    assert not scattered.writable


def test_a_scattered_image_keeps_its_memory() -> None:
    """A view of it keeps the owners alive; its path is checked like that of every image."""
    memory = bytearray(b"abc")
    array = np.frombuffer(memory, dtype=np.uint8)
    places = {"starts": [0], "addresses": np.array([array.ctypes.data]), "lengths": np.array([3])}
    owner = _Owner()
    held = weakref.ref(owner)
    image = ScatteredImage("f", **places, owners=[owner, array])
    (view,) = image.views(1, 3)
    del image, owner
    gc.collect()
    assert held() is not None
    assert bytes(view) == b"bc"
    with pytest.raises(IndexError, match="an image of 3 bytes"):
        ScatteredImage("f", **places, owners=array).views(1, 4)
    with pytest.raises(UsageError, match="must be relative"):
        ScatteredImage("/f", **places, owners=array)


class _Owner:
    pass
