"""Gpt: a small transformer to train while checkpoints are saved; only its size matters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from iobench.errors import OptionError

VOCABULARY = 256  # bytes
CONTEXT = 64  # tokens
_HEAD = 16  # width of an attention head
_SMALLEST = 100_000


class Gpt(nn.Module):
    """A decoder of `depth` blocks of `width`, pre-normalized, its head tied to its embedding."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.width, self.depth = width, depth
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    @classmethod
    def of_size(cls, params: int) -> Gpt:
        """Return the model with the number of parameters nearest to `params`.

        Its width is about 64 times its depth.

        A block has about 12 width^2 parameters. Raises OptionError below 100,000.
        """
        if params < _SMALLEST:
            raise OptionError(f"--model-params {params}: at least {_SMALLEST}")
        shapes = [
            (_HEAD * heads, depth) for heads in range(1, 400) for depth in _depths(_HEAD * heads)
        ]
        width, depth = min(shapes, key=lambda shape: abs(_params(*shape) - params))
        return cls(width=width, depth=depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the token after each of `tokens` (batch, length up to CONTEXT)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of predicting each token from those before it."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (
            part.view(batch, length, width // _HEAD, _HEAD).transpose(1, 2) for part in parts
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        changed: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return changed


def _depths(width: int) -> range:
    """Return the depths to try: about one layer per 64 of width, usual for models of all sizes."""
    usual = max(1, width // 64)
    return range(max(1, usual // 2), usual * 2 + 1)


def _params(width: int, depth: int) -> int:
    block = 12 * width * width + 13 * width
    return depth * block + (VOCABULARY + CONTEXT) * width + 2 * width
