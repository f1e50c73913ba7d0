"""The order of the tensors' bytes in a file, which depends on the file's format."""

from __future__ import annotations

from dataclasses import replace

from iobench.bench.data.nested import leaves, nested
from iobench.formats.safetensors_header import file_order
from iobench.workloads.specs import FileSpec, TensorSpec

__all__ = ["in_payload_order", "payload_sizes"]


def in_payload_order(spec: FileSpec) -> FileSpec:
    """Return `spec` with its tensors in the order of their bytes in the file.

    A DCP file gets one more "tensor" for the archives' headers that are not tensors.
    """
    by_name = {tensor.name: tensor for tensor in spec.tensors}
    if spec.format == "safetensors":
        tensors = sorted(by_name.values(), key=lambda one: file_order((one.name, one.dtype, ())))
    elif spec.format == "torch":
        tensors = [by_name[name] for name in leaves(nested({name: name for name in by_name}))]
    else:
        tensors = list(spec.tensors)
        if rest := _headers(spec):
            tensors.append(TensorSpec(name="archive headers", dtype="uint8", shape=(rest,)))
    same = tensors == list(spec.tensors)
    return spec if same else replace(spec, tensors=tuple(tensors))


def payload_sizes(spec: FileSpec) -> list[int]:
    """Return the bytes of each tensor of `in_payload_order(spec)`, in any order."""
    rest = _headers(spec)
    return [*(tensor.size_bytes for tensor in spec.tensors), *([rest] if rest else [])]


def _headers(spec: FileSpec) -> int:
    """Return the bytes of a DCP file that are not tensors; 0 where a format knows its header."""
    if spec.format in ("safetensors", "torch"):
        return 0
    return max(0, spec.size_bytes - spec.payload_bytes)
