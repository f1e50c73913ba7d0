"""The order of the tensors' bytes in a file, which depends on the file's format."""

from __future__ import annotations

from dataclasses import replace

from iobench.bench.data.nested import leaves, nested
from iobench.formats.safetensors_header import header_bytes
from iobench.workloads.specs import FileSpec, TensorSpec

__all__ = ["in_payload_order"]


def in_payload_order(spec: FileSpec) -> FileSpec:
    """Return `spec` with its tensors in the order of their bytes in the file.

    A DCP file gets one more "tensor" for the archives' headers that are not tensors.
    """
    tensors = list(spec.tensors)
    by_name = {tensor.name: tensor for tensor in tensors}
    if spec.format == "safetensors":
        _, places = header_bytes([(t.name, t.dtype, t.shape) for t in tensors])
        tensors = [by_name[name] for name in places]
    elif spec.format == "torch":
        tensors = [by_name[name] for name in leaves(nested({name: name for name in by_name}))]
    elif spec.size_bytes > spec.payload_bytes:
        rest = spec.size_bytes - spec.payload_bytes
        tensors.append(TensorSpec(name="archive headers", dtype="uint8", shape=(rest,)))
    return replace(spec, tensors=tuple(tensors))
