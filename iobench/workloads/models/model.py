"""Model: an architecture combined with a family's tensor templates.

A template row is (name, shape, split). The shape uses the symbols of `Arch.symbols`, such as
("NH*HD", "H"). `split` is the dimension that tensor parallelism splits; None means that every
tensor parallel rank holds a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

__all__ = ["Arch", "Family", "Model", "Parameter", "Row"]

Row = tuple[str, tuple[str, ...], int | None]


@dataclass(frozen=True, kw_only=True)
class Arch:
    """The numbers that determine every tensor's shape.

    By default `num_kv_heads` is `num_heads` and `head_dim` is `hidden_size // num_heads`. Only
    families with learned positions use `max_positions` (GPT-2, Megatron GPT).
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_hidden_size: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int | None = None

    def symbols(self) -> dict[str, int]:
        """Return the symbols of template shapes. QKV is the width of q, k and v, as in DLIO."""
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
        }

    def shrunk(self, factor: int) -> Arch:
        """Return `1/factor` of the width: hidden, ffn, heads or their dimension, and vocabulary.

        `factor` is a power of two. Raises ValueError when hidden, ffn or heads cannot be divided.
        """
        kv_heads = self.num_kv_heads or self.num_heads
        head_dim = self.head_dim or self.hidden_size // self.num_heads
        heads = 1
        while heads < factor and not (self.num_heads % (2 * heads) or kv_heads % (2 * heads)):
            heads *= 2
        if (
            self.hidden_size % factor
            or self.ffn_hidden_size % factor
            or head_dim % (factor // heads)
        ):
            raise ValueError(f"width {self.hidden_size} cannot be divided by {factor}")
        return replace(
            self,
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

    @property
    def elements(self) -> int:
        """Number of elements."""
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
    hidden size must be a multiple of the heads.
    """

    id: str
    embedding: tuple[Row, ...]
    layer: tuple[Row, ...]
    head: tuple[Row, ...]
    vocab_multiple: int = 1
    whole_heads: bool = True

    @property
    def symbols(self) -> frozenset[str]:
        """The symbols that the templates are written in."""
        rows = (*self.embedding, *self.layer, *self.head)
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

    @property
    def symbols(self) -> dict[str, int]:
        """`Arch.symbols` with the vocabulary padded like in the framework."""
        symbols = self.arch.symbols()
        multiple = self.vocab_multiple or self.family.vocab_multiple
        symbols["V"] = -(-symbols["V"] // multiple) * multiple
        return symbols

    def embedding(self) -> tuple[Parameter, ...]:
        """Return the embedding's tensors; empty when it was dropped."""
        return self._expand(self.family.embedding) if self.keep_embedding else ()

    def layer(self, index: int) -> tuple[Parameter, ...]:
        """Return the tensors of layer `index`."""
        return self._expand(self.family.layer, index)

    def head(self) -> tuple[Parameter, ...]:
        """Return the head's tensors; empty when it was dropped."""
        return self._expand(self.family.head) if self.keep_head else ()

    def parameters(self) -> Iterator[Parameter]:
        """Yield every tensor in state dict order."""
        yield from self.embedding()
        for index in range(self.arch.num_layers):
            yield from self.layer(index)
        yield from self.head()

    @property
    def num_parameters(self) -> int:
        """Exact number of parameters, including the padded vocabulary."""
        blocks = (*self.embedding(), *self.head())
        per_layer = sum(parameter.elements for parameter in self.layer(0))
        return sum(p.elements for p in blocks) + self.arch.num_layers * per_layer

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        layers = self.arch.num_layers * len(self.family.layer)
        return len(self.embedding()) + layers + len(self.head())

    def kept(self, *, layers: int, embedding: bool, head: bool) -> Model:
        """Return the model with only `layers` layers, with or without the other blocks."""
        arch = replace(self.arch, num_layers=layers)
        return replace(self, arch=arch, keep_embedding=embedding, keep_head=head)

    def shrunk(self, factor: int) -> Model:
        """Return the model at `1/factor` of its width. Raises ValueError like `Arch.shrunk`."""
        return replace(self, arch=self.arch.shrunk(factor))

    def padded(self, multiple: int) -> Model:
        """Return the model with its vocabulary padded to a multiple."""
        return replace(self, vocab_multiple=multiple)

    def _expand(self, rows: tuple[Row, ...], index: int = 0) -> tuple[Parameter, ...]:
        symbols = self.symbols
        return tuple(
            Parameter(
                name=name.replace("{i}", str(index)),
                shape=tuple(_product(length, symbols) for length in shape),
                split=split,
            )
            for name, shape, split in rows
        )


def _product(expression: str, symbols: Mapping[str, int]) -> int:
    """Return the product of numbers and symbols joined by "*", such as "3*H"."""
    return prod(symbols[term] if term in symbols else int(term) for term in expression.split("*"))
