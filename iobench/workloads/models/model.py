"""Model: an architecture combined with a family's tensor templates.

A template row is (name, shape, split). The shape uses the symbols of `Arch.symbols`, such as
("NH*HD", "H"). `split` is the dimension that tensor parallelism splits; None means that every
tensor parallel rank holds a copy. In a name `{i}` is the layer and `{e}` the expert; neighbouring
rows with `{e}` are repeated together, once per expert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Annotated

from msgspec import Meta

Row = tuple[str, tuple[str, ...], int | None]
Length = Annotated[int, Meta(ge=1, le=2**27)]
"""A dimension of a tensor. The bound turns a typing error into a message, not an hour of work."""
Amount = Annotated[int, Meta(ge=1, le=10_000)]


@dataclass(frozen=True, kw_only=True)
class Arch:
    """The numbers that determine every tensor's shape.

    By default `num_kv_heads` is `num_heads` and `head_dim` is `hidden_size // num_heads`. Only
    families with learned positions use `max_positions` (GPT-2, Megatron GPT).

    Mixture-of-experts families use `num_experts`, the routed experts of a layer, each of width
    `expert_ffn_size`; `num_shared_experts`, which see every token; and `num_dense_layers`, the
    first layers, which have one network of `ffn_hidden_size` instead. Multi-head latent attention
    has the ranks of its projections, `q_lora_rank` and `kv_lora_rank`, and the parts of a head:
    `qk_nope_head_dim`, `qk_rope_head_dim`, `v_head_dim`.
    """

    vocab_size: Length
    hidden_size: Length
    num_layers: Amount
    num_heads: Length
    ffn_hidden_size: Length
    num_kv_heads: Length | None = None
    head_dim: Length | None = None
    max_positions: Length | None = None
    num_experts: Amount | None = None
    expert_ffn_size: Length | None = None
    num_shared_experts: Amount | None = None
    num_dense_layers: Amount | None = None
    q_lora_rank: Length | None = None
    kv_lora_rank: Length | None = None
    qk_nope_head_dim: Length | None = None
    qk_rope_head_dim: Length | None = None
    v_head_dim: Length | None = None

    def symbols(self) -> dict[str, int]:
        """Return the symbols of template shapes. QKV is the width of q, k and v, as in DLIO.

        FE is the width of an expert and FS that of all shared ones together. QD is a latent query
        head, KVA the compressed key and value with the rotary part, KVB a key and value head.
        """
        kv_heads = self.num_kv_heads or self.num_heads
        head_dim = self.head_dim or self.hidden_size // self.num_heads
        return {
            "V": self.vocab_size,
            "H": self.hidden_size,
            "L": self.num_layers,
            "NH": self.num_heads,
            "NKV": kv_heads,
            "HD": head_dim,
            "F": self.ffn_hidden_size,
            "P": self.max_positions or 0,
            "QKV": self.hidden_size + 2 * head_dim * kv_heads,
            "E": self.num_experts or 0,
            "FE": self.expert_ffn_size or 0,
            "FS": (self.num_shared_experts or 0) * (self.expert_ffn_size or 0),
            "QR": self.q_lora_rank or 0,
            "KR": self.kv_lora_rank or 0,
            "QD": (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0),
            "KVA": (self.kv_lora_rank or 0) + (self.qk_rope_head_dim or 0),
            "KVB": (self.qk_nope_head_dim or 0) + (self.v_head_dim or 0),
            "VD": self.v_head_dim or 0,
        }

    def shrunk(self, factor: int) -> Arch:
        """Return `1/factor` of the width: hidden, ffn, heads or their dimension, and vocabulary.

        The latent ranks shrink too. `factor` is a power of two. Raises ValueError when one of them
        cannot be divided.
        """
        kv_heads = self.num_kv_heads or self.num_heads
        head_dim = self.head_dim or self.hidden_size // self.num_heads
        heads = 1
        while heads < factor and not (self.num_heads % (2 * heads) or kv_heads % (2 * heads)):
            heads *= 2
        others = ("expert_ffn_size", "q_lora_rank", "kv_lora_rank")
        widths = {name: value for name in others if (value := getattr(self, name)) is not None}
        head_parts = 0 if self.kv_lora_rank is None else factor // heads - 1  # they stay whole
        if (
            any(width % factor for width in widths.values())
            or self.hidden_size % factor
            or self.ffn_hidden_size % factor
            or head_dim % (factor // heads)
            or head_parts
        ):
            raise ValueError(f"width {self.hidden_size} cannot be divided by {factor}")
        return replace(
            self,
            **{name: width // factor for name, width in widths.items()},
            vocab_size=-(-self.vocab_size // factor),
            hidden_size=self.hidden_size // factor,
            ffn_hidden_size=self.ffn_hidden_size // factor,
            num_heads=self.num_heads // heads,
            num_kv_heads=kv_heads // heads if self.num_kv_heads else None,
            head_dim=self.head_dim * heads // factor if self.head_dim else None,
        )


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One trained tensor of the unsharded model."""

    name: str
    shape: tuple[int, ...]
    split: int | None
    expert: int | None = None
    """The index of the routed expert that it belongs to; None for all other tensors."""
    trained: bool = True
    """Whether the optimizer updates it. Buffers are saved with the weights, without moments."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether trainers apply weight decay to it: to matrices, not to vectors."""
        return len(self.shape) > 1

    def split_by(self, ranks: int) -> Parameter:
        """Return the part that each of `ranks` tensor parallel ranks holds."""
        if self.split is None or ranks == 1:
            return self
        shape = list(self.shape)
        shape[self.split] //= ranks
        return replace(self, shape=tuple(shape))


@dataclass(frozen=True, kw_only=True)
class Family:
    """Tensor templates of one kind of model, in state dict order: embedding, layers, head.

    A tied output layer is saved once, as the embedding, and is not listed. The framework pads the
    vocabulary to a multiple of `vocab_multiple` per tensor parallel rank. With `whole_heads` the
    hidden size must be a multiple of the heads. `dense_layer` has the rows of the first layers of a
    mixture-of-experts model, if they differ. `buffers` are ends of names of tensors that no
    optimizer updates.
    """

    id: str
    embedding: tuple[Row, ...]
    layer: tuple[Row, ...]
    head: tuple[Row, ...]
    vocab_multiple: int = 1
    whole_heads: bool = True
    dense_layer: tuple[Row, ...] = ()
    buffers: tuple[str, ...] = ()

    @property
    def has_experts(self) -> bool:
        return any("{e}" in name for name, _, _ in self.layer)

    @property
    def symbols(self) -> frozenset[str]:
        rows = (*self.embedding, *self.layer, *self.dense_layer, *self.head)
        return frozenset(
            term for _, shape, _ in rows for length in shape for term in length.split("*")
        )


@dataclass(frozen=True, kw_only=True)
class Model:
    """An architecture of a family, whole or scaled down to some of its blocks.

    Blocks are the embedding (with learned positions), each layer, and the head: the final norm and
    an untied output layer. `tokenizer` maps the small files of HF models to their bytes.
    """

    name: str
    family: Family
    arch: Arch
    source: str = ""
    tokenizer: Mapping[str, int] = field(default_factory=dict)
    keep_embedding: bool = True
    keep_head: bool = True
    vocab_multiple: int | None = None

    @cached_property
    def symbols(self) -> Mapping[str, int]:
        """`Arch.symbols` with the vocabulary padded like in the framework."""
        symbols = self.arch.symbols()
        multiple = self.vocab_multiple or self.family.vocab_multiple
        symbols["V"] = -(-symbols["V"] // multiple) * multiple
        return symbols

    @cached_property
    def _row_shapes(self) -> Mapping[tuple[str, ...], tuple[int, ...]]:
        """The shapes of the family's rows as numbers."""
        family, symbols = self.family, self.symbols
        rows = (*family.embedding, *family.layer, *family.dense_layer, *family.head)
        return {shape: tuple(_product(one, symbols) for one in shape) for _, shape, _ in rows}

    def embedding(self) -> tuple[Parameter, ...]:
        """Return the embedding's tensors; empty when it was dropped."""
        return self._expand(self.family.embedding) if self.keep_embedding else ()

    def layer(self, index: int) -> tuple[Parameter, ...]:
        dense = index < (self.arch.num_dense_layers or 0)
        return self._expand(self.family.dense_layer if dense else self.family.layer, index)

    def layer_kinds(self) -> list[tuple[int, int]]:
        """Return (index of the first, number of layers) for each kind of layer."""
        dense = self.arch.num_dense_layers or 0
        kinds = [(0, dense), (dense, self.arch.num_layers - dense)]
        return [(first, count) for first, count in kinds if count]

    def head(self) -> tuple[Parameter, ...]:
        """Return the head's tensors; empty when it was dropped."""
        return self._expand(self.family.head) if self.keep_head else ()

    def parameters(self) -> Iterator[Parameter]:
        yield from self.embedding()
        for index in range(self.arch.num_layers):
            yield from self.layer(index)
        yield from self.head()

    @cached_property
    def shapes(self) -> Counter[tuple[tuple[int, ...], bool]]:
        """The number of tensors of each shape, by (shape, whether it is trained)."""
        found: Counter[tuple[tuple[int, ...], bool]] = Counter()
        blocks = [(self.embedding(), 1), (self.head(), 1)]
        blocks += [(self.layer(first), count) for first, count in self.layer_kinds()]
        for parameters, count in blocks:
            for parameter in parameters:
                found[parameter.shape, parameter.trained] += count
        return found

    @property
    def num_parameters(self) -> int:
        """Exact number of parameters, including the padded vocabulary and buffers."""
        return sum(count * prod(shape) for (shape, _), count in self.shapes.items())

    @property
    def num_tensors(self) -> int:
        return self.shapes.total()

    @property
    def num_trained(self) -> int:
        return sum(count for (_, trained), count in self.shapes.items() if trained)

    def kept(self, *, layers: int, embedding: bool, head: bool) -> Model:
        """Return the model with only `layers` layers, with or without the other blocks.

        Dense layers of a mixture-of-experts model keep their share, rounded.
        """
        arch = replace(self.arch, num_layers=layers)
        if arch.num_dense_layers:
            dense = round(arch.num_dense_layers * layers / self.arch.num_layers)
            arch = replace(arch, num_dense_layers=dense)
        return replace(self, arch=arch, keep_embedding=embedding, keep_head=head)

    def with_experts(self, number: int) -> Model:
        return replace(self, arch=replace(self.arch, num_experts=number))

    def shrunk(self, factor: int) -> Model:
        """Return the model at `1/factor` of its width. Raises ValueError like `Arch.shrunk`."""
        return replace(self, arch=self.arch.shrunk(factor))

    def padded(self, multiple: int) -> Model:
        return replace(self, vocab_multiple=multiple)

    def _expand(self, rows: tuple[Row, ...], index: int = 0) -> tuple[Parameter, ...]:
        found = []
        for routed, group in groupby(rows, key=lambda row: "{e}" in row[0]):
            shaped = [
                (name.replace("{i}", str(index)), self._row_shapes[shape], split)
                for name, shape, split in group
            ]
            for expert in range(self.symbols["E"]) if routed else (None,):
                found += [
                    Parameter(
                        name=name.replace("{e}", str(expert)) if routed else name,
                        shape=shape,
                        split=split,
                        expert=expert,
                        trained=not name.endswith(self.family.buffers),
                    )
                    for name, shape, split in shaped
                ]
        return tuple(found)


def _product(expression: str, symbols: Mapping[str, int]) -> int:
    """Return the product of numbers and symbols joined by "*", such as "3*H"."""
    return prod(symbols[term] if term in symbols else int(term) for term in expression.split("*"))
