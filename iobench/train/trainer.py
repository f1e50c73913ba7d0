"""Trainer: a real training loop with equal losses for equal seeds, resumable bit for bit."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from iobench.errors import OptionError


class Trainer:
    """Trains a Gpt of about `params` parameters with AdamW on `device`.

    The batch of a step depends only on the step, so a resumed run has the same batches.
    `ballast_bytes` are added to the state, to give it the size of another model's. A step changes
    all of them (see `change_in_parts`). Steps compute in `threads` threads; None for torch's own
    number.
    """

    def __init__(
        self,
        params: int,
        *,
        device: str = "cpu",
        ballast_bytes: int = 0,
        threads: int | None = None,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = Gpt.of_size(params).to(device)
        self._initial = copy.deepcopy(self.model.state_dict())
        self.optimizer = self._new_optimizer()
        self._threads = threads
        self._device = device
        self._ballast = torch.zeros(ballast_bytes, dtype=torch.uint8, device=device)
        self._ballast.random_(generator=torch.Generator(device).manual_seed(0))
        self._parts: tuple[torch.Tensor, ...] = (self._ballast,)
        self.steps_done = 0
        self.update_s = 0.0
        """The shortest update of parameters so far, in seconds; 0 before the first."""

    def change_in_parts(self, parts: int) -> None:
        """Go back to the start; from now on a step changes one of `parts` parts of the ballast."""
        self.rewind()
        self._parts = self._ballast.chunk(parts)

    def step(self, before_update: Callable[[], None] = lambda: None) -> float:
        """Train on the next batch and return its loss.

        `before_update` is called when the gradients are computed. Parameters, optimizer state and
        ballast change only after it.
        """
        usual = torch.get_num_threads()
        torch.set_num_threads(self._threads or usual)
        try:
            return self._step(before_update)
        finally:
            torch.set_num_threads(usual)

    def _step(self, before_update: Callable[[], None]) -> float:
        loss = self.model.loss(self._tokens())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        before_update()
        began_s = time.perf_counter()
        self.optimizer.step()
        self._parts[self.steps_done % len(self._parts)].add_(1)
        self.steps_done += 1
        value = float(loss.detach())  # on CUDA it waits for the update
        self.update_s = min(self.update_s or math.inf, time.perf_counter() - began_s)
        return value

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold. Its tensors are the trainer's own."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ballast": self._ballast,
            "steps_done": self.steps_done,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state that `state` returned. Copies it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._ballast.copy_(state["ballast"])
        self.steps_done = state["steps_done"]

    def rewind(self) -> None:
        """Go back to the state before the first step, bit for bit, in the same memory."""
        self.model.load_state_dict(self._initial)
        self.optimizer = self._new_optimizer()
        for index, part in enumerate(self._parts):
            part.sub_(len(range(index, self.steps_done, len(self._parts))) % 256)
        self.steps_done = 0

    def _new_optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def _tokens(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.steps_done)
        shape = (_BATCH, CONTEXT + 1)
        # A random walk gives the model something to learn: each token is near the one before it.
        walk = torch.randint(-2, 3, shape, generator=generator).cumsum(dim=1)
        return (walk % VOCABULARY).to(self._device)


VOCABULARY = 256  # bytes
_BATCH = 8
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
        block = nn.TransformerEncoderLayer(
            *(width, width // _HEAD, 4 * width),
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, depth, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    @classmethod
    def of_size(cls, params: int) -> Gpt:
        """Return the model with the number of parameters nearest to `params`.

        It has about one block for each 64 of its width, usual for models of all sizes. A block has
        about 12 width^2 parameters. Raises OptionError below 100,000.
        """
        if params < _SMALLEST:
            raise OptionError(f"--model-params {params}: at least {_SMALLEST}")
        shapes = [
            (width, depth)
            for width in range(_HEAD, 400 * _HEAD, _HEAD)
            for usual in [max(1, width // 64)]
            for depth in range(max(1, usual // 2), usual * 2 + 1)
        ]
        width, depth = min(shapes, key=lambda shape: abs(_params(*shape) - params))
        return cls(width=width, depth=depth)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits for the token after each of `tokens` (batch, length up to CONTEXT)."""
        length, device = tokens.shape[1], tokens.device
        hidden = self.tokens(tokens) + self.positions(torch.arange(length, device=device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device)
        logits: Tensor = self.head(self.blocks(hidden, mask, is_causal=True))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross entropy of predicting each token from those before it."""
        logits = self(tokens[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def _params(width: int, depth: int) -> int:
    block = 12 * width * width + 13 * width
    return depth * block + (VOCABULARY + CONTEXT) * width + 2 * width
