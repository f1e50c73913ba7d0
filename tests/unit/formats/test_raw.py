"""raw files hold the tensors' bytes and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from iobench.errors import DataMismatchError, UsageError
from iobench.formats import raw
from iobench.formats.tensors import tensor_bytes

_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


def test_round_trip(writer, random_tensor, same, tmp_path: Path) -> None:
    """The file is the tensors' bytes in the order given, empty and 0-dim ones too; they come back
    bit for bit, over every writer."""
    tensors = [random_tensor(dtype, 37, 61, seed=n) for n, dtype in enumerate(_DTYPES)]
    tensors += [torch.empty(0), torch.tensor(7, dtype=torch.int16)]
    raw.save(tensors, "file", tmp_path, writer)
    wanted = b"".join(tensor_bytes(tensor).tobytes() for tensor in tensors)
    assert (tmp_path / "file").read_bytes() == wanted
    back = [torch.zeros_like(tensor) for tensor in tensors]
    raw.load(back, "file", tmp_path, writer)
    assert all(map(same, back, tensors))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_other_tensors_do_not_fit(buffered, tmp_path: Path) -> None:
    """A file of another size than the tensors ask for is a mismatch; sparse ones have no bytes."""
    raw.save([torch.zeros(5)], "file", tmp_path, buffered)
    with pytest.raises(DataMismatchError, match="20 bytes"):
        raw.load([torch.zeros(6)], "file", tmp_path, buffered)
    with pytest.raises(UsageError, match="sparse_csr"):
        raw.load([torch.eye(3).to_sparse_csr()], "file", tmp_path, buffered)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 2).t(),
        torch.zeros(12)[::2],
        torch.zeros(1).expand(6),
        torch.zeros(3, dtype=torch.complex64).conj(),
        torch.zeros(6, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "negated"],
)
def test_tensors_that_cannot_be_filled(tensor: torch.Tensor, buffered, tmp_path: Path) -> None:
    """Their bytes would go to a copy without an owner: they are refused, and nothing is filled."""
    fits = torch.zeros(5)
    raw.save([torch.ones(5), tensor + 1], "file", tmp_path, buffered)
    with pytest.raises(UsageError, match="a tensor of shape"):
        raw.load([fits, tensor], "file", tmp_path, buffered)
    assert not fits.any()
