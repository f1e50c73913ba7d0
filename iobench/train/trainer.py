"""Trainer: a real training loop with equal losses for equal seeds, resumable bit for bit."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from iobench.train.gpt import CONTEXT, VOCABULARY, Gpt


class Trainer:
    """Trains a Gpt of about `params` parameters with AdamW on `device`.

    The batch of a step depends only on `seed` and the step, so a resumed run has the same batches.
    `ballast_bytes` are added to the state, to give it the size of another model's. A step changes
    all of them (see `change_in_parts`). Steps compute in `threads` threads; None for torch's own
    number.
    """

    def __init__(
        self,
        params: int,
        *,
        seed: int = 0,
        batch: int = 8,
        device: str = "cpu",
        ballast_bytes: int = 0,
        threads: int | None = None,
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = Gpt.of_size(params).to(device)
        self._initial = copy.deepcopy(self.model.state_dict())
        self.optimizer = self._new_optimizer()
        self._threads = threads
        self._seed, self._batch, self._device = seed, batch, device
        self._ballast = torch.zeros(ballast_bytes, dtype=torch.uint8, device=device)
        self._ballast.random_(generator=torch.Generator(device).manual_seed(seed))
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
        if self._threads is None:
            return self._step(before_update)
        usual = torch.get_num_threads()
        torch.set_num_threads(self._threads)
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
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.steps_done)
        shape = (self._batch, CONTEXT + 1)
        # A random walk gives the model something to learn: each token is near the one before it.
        walk = torch.randint(-2, 3, shape, generator=generator).cumsum(dim=1)
        return (walk % VOCABULARY).to(self._device)
