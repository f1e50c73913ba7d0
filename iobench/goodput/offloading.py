"""Offloading: what optimizer state on SSDs costs a step, an SSD and a restart, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MASTER_BYTES", "MOVED_BYTES", "READ_BYTES", "WRITTEN_BYTES", "Offloading"]

MASTER_BYTES = 12
"""Of a parameter: fp32 master weight and both moments of Adam."""
PARAMETER_BYTES = 2
"""Of a 16-bit parameter, which the model computes with."""
READ_BYTES = MASTER_BYTES
WRITTEN_BYTES = MASTER_BYTES + PARAMETER_BYTES
MOVED_BYTES = READ_BYTES + WRITTEN_BYTES
"""Of a parameter in each step."""
BACKWARD_SHARE = 2 / 3
"""Of forward and backward: backward has twice the operations (arXiv 2104.04473, appendix)."""
_DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Offloading:
    """Optimizer state of 16-bit parameters on the SSDs of `nodes` nodes, an equal part on each.

    `rate_bytes_per_s` is what the SSDs of one node move, reads and writes together, in this mix.
    `step_s` is forward and backward, `backward_s` the part in which the stream can run: gradients
    arrive during it, and memory for the state of more chunks becomes free. `rated_bytes` is what
    the SSDs of a node are rated to write in their life; None if unknown.
    """

    parameters: int
    nodes: int
    rate_bytes_per_s: float
    step_s: float
    backward_s: float
    rated_bytes: int | None = None

    @property
    def elements(self) -> int:
        """Parameters whose state is on one node."""
        return -(-self.parameters // self.nodes)

    @property
    def memory_saved_bytes(self) -> int:
        """Memory of a node that the state took, without what the engine takes (`memory`)."""
        return MASTER_BYTES * self.elements

    @property
    def moved_bytes(self) -> int:
        """Bytes that a node reads and writes in a step."""
        return MOVED_BYTES * self.elements

    @property
    def stream_s(self) -> float:
        """The time of these bytes."""
        return self.moved_bytes / self.rate_bytes_per_s

    @property
    def pays(self) -> bool:
        """Whether backward hides the stream: 26 B x parameters / rate <= backward."""
        return self.stream_s <= self.backward_s

    @property
    def hidden_step_s(self) -> float:
        """A step when the stream runs during backward; its rest comes after it."""
        return self.step_s + max(0.0, self.stream_s - self.backward_s)

    @property
    def serial_step_s(self) -> float:
        """A step when the stream begins after backward."""
        return self.step_s + self.stream_s

    @property
    def needed_rate_bytes_per_s(self) -> float:
        """The rate with which backward hides the stream."""
        return self.moved_bytes / self.backward_s

    @property
    def written_bytes(self) -> int:
        """Bytes that a node writes in a step."""
        return WRITTEN_BYTES * self.elements

    @property
    def written_per_day_bytes(self) -> float:
        """Bytes that a node writes in a day of steps of `hidden_step_s`."""
        return self.written_bytes * _DAY_S / self.hidden_step_s

    @property
    def life_days(self) -> float | None:
        """Days until a node has written what its SSDs are rated for; None if unknown."""
        return None if self.rated_bytes is None else self.rated_bytes / self.written_per_day_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of a whole checkpoint on one node; a pin writes none of them again."""
        return WRITTEN_BYTES * self.elements

    @property
    def restore_bytes(self) -> int:
        """Bytes that a node reads before training goes on: the parameters."""
        return PARAMETER_BYTES * self.elements
