"""`meta-export`: weights in the layout of Meta's Llama 2 downloads, one file per model shard.

The names are those of Meta's own model code, and the embedding is split along its width. The files
were written by torch before 2.1. Their archive is named `consolidated` in a single file and
`consolidated.NN` in a shard. The files of Llama 2 7B and 70B have the published sizes, to the byte.
Source: meta-llama/llama, llama/model.py and llama/generation.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from iobench.workloads import torch_sizes
from iobench.workloads.layouts.layout import CONFIG, DTYPES, Layout, Ranks, raw_file
from iobench.workloads.models.model import Model, Parameter
from iobench.workloads.specs import FileSpec, TensorSpec

_EMBEDDING = "tok_embeddings.weight"
_LAYER = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Tensor of a layer as transformers names it -> Meta's name, in Meta's order."""


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class MetaExport(Layout):
    """`tensor_parallel` ranks, each with one `consolidated.NN.pth`; rank 0 adds two small files."""

    id: ClassVar[str] = "meta-export"
    families: ClassVar[tuple[str, ...]] = ("llama",)

    tensor_parallel: Ranks = 1
    precision: Literal["bf16", "fp16"] = "bf16"

    def check(self, model: Model) -> None:
        """Raise ValueError when heads, widths or vocabulary do not divide by the shards."""
        super().check(model)
        arch = model.arch
        for name, value in (
            ("num_heads", arch.num_heads),
            ("num_kv_heads", arch.num_kv_heads or arch.num_heads),
            ("hidden_size", arch.hidden_size),
            ("ffn_hidden_size", arch.ffn_hidden_size),
            ("vocab_size", arch.vocab_size),
        ):
            if value % self.tensor_parallel:
                raise ValueError(
                    f"tensor_parallel is {self.tensor_parallel}: must divide {name} of "
                    f"{model.name}, which is {value}"
                )

    def rank_class(self, model: Model, rank: int) -> Hashable:
        """Rank 0, and the others, by the length of their archive's name."""
        del model
        return rank == 0, len(self._archive(rank))

    def files(self, model: Model, rank: int) -> tuple[FileSpec, ...]:
        """consolidated.NN.pth; rank 0 then params.json and checklist.chk, the MD5 sums."""
        tensors = tuple(self._tensors(model))
        size = torch_sizes.archive_bytes(
            torch_sizes.dict_pickle_bytes(tensors),
            [tensor.size_bytes for tensor in tensors],
            self._archive(rank),
            before_2_1=True,
        )
        shard = FileSpec(
            path=self._path(rank), format="torch", tensors=tensors, size_bytes=size, exact=True
        )
        if rank:
            return (shard,)
        listed = [*map(self._path, range(self.ranks)), "params.json"]
        checklist = sum(32 + 2 + len(path) + 1 for path in listed)  # as md5sum prints them
        return (shard, raw_file("params.json", 102), raw_file("checklist.chk", checklist))

    def _path(self, rank: int) -> str:
        return f"consolidated.{rank:02d}.pth"

    def _archive(self, rank: int) -> str:
        return "consolidated" if self.ranks == 1 else f"consolidated.{rank:02d}"

    def _tensors(self, model: Model) -> Iterator[TensorSpec]:
        for parameter in model.embedding():
            yield self._tensor(_EMBEDDING, replace(parameter, split=1))
        for parameter, name in zip(model.head(), ("norm.weight", "output.weight"), strict=False):
            yield self._tensor(name, parameter)
        freqs = model.symbols["HD"] // 2
        yield TensorSpec(name="rope.freqs", dtype=DTYPES[self.precision], shape=(freqs,))
        for index in range(model.arch.num_layers):
            prefix = f"model.layers.{index}."
            found = {p.name.removeprefix(prefix): p for p in model.layer(index)}
            for theirs, name in _LAYER.items():
                parameter = found[f"{theirs}.weight"]
                yield self._tensor(f"layers.{index}.{name}.weight", parameter)

    def _tensor(self, name: str, parameter: Parameter) -> TensorSpec:
        shape = parameter.split_by(self.tensor_parallel).shape
        return TensorSpec(name=name, dtype=DTYPES[self.precision], shape=shape)
