"""Save: one checkpoint on its way, from the trainer's call to storage."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

from iobench.writers.transfer import Transfer

__all__ = ["Save", "Status"]

Status = Literal["copying", "waiting", "writing", "committed", "superseded", "skipped", "failed"]


@dataclass(kw_only=True)
class Save:
    """What became of one save; `status` moves on while the background works.

    - `copying`: the snapshot is being taken (lazy saves); `waiting`: it was, and waits for storage
    - `writing`, then `committed`: durable and visible, the only status that says so
    - `superseded`: a newer snapshot took its turn; `skipped`: no slot was free
    - `failed`: see `error`, a copy without traceback of what the Checkpointer raises

    `stall_s` is how long the trainer stood still, in this call and in `before_optimizer_step`;
    `persist_s` from the first byte written to the commit.
    """

    step: int
    status: Status
    created_s: float
    size_bytes: int = 0
    stall_s: float = 0.0
    persist_s: float | None = None
    transfer: Transfer | None = None
    error: BaseException | None = None

    @property
    def on_the_way(self) -> bool:
        """Whether it is not known yet what becomes of it."""
        return self.status in ("copying", "waiting", "writing")

    def fail(self, error: BaseException) -> None:
        """Note `error`. A save that is committed stays so: something failed after it.

        Without the traceback, whose frames hold the state that was saved.
        """
        try:
            self.error = copy.copy(error)
        except Exception:  # noqa: BLE001 -- its class takes other arguments than it keeps
            self.error = RuntimeError(f"{type(error).__name__}: {error}")
        if self.status != "committed":
            self.status = "failed"
