"""Peer: another project's way to save a state dict and to restore it."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from iobench.errors import UnavailableError, UsageError
from iobench.writers.availability import Availability
from iobench.writers.options import WriterOptions

if TYPE_CHECKING:
    import torch

__all__ = ["NoOptions", "Peer", "State"]

State = Mapping[str, "torch.Tensor"]
"""Tensors by name; flat, dense and on the CPU."""


class NoOptions(WriterOptions):
    """Of a peer that has none."""


class Peer(ABC):
    """Saves and restores one state dict per path. Used from one thread.

    `syncs` says whether what `save` wrote is on storage when it returns, by the peer's own doing;
    if not, the bench syncs its files before it stops the clock. `saves` is False for a peer that
    only restores; it is given safetensors files. `modules` must be importable, which
    `pip install <packages>` brings about.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `iobench writers`."""
    schemes: ClassVar[tuple[str, ...]] = ("file",)
    saves: ClassVar[bool] = True
    syncs: ClassVar[bool] = False
    suffix: ClassVar[str] = ""
    """What the name of a file of its own ends with; some libraries look at that."""
    modules: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[str] = ""
    notes: ClassVar[tuple[str, ...]] = ()
    """What a reader of its figures should know."""
    Options: ClassVar[type[WriterOptions]] = NoOptions

    def __init__(self, options: WriterOptions | None = None) -> None:
        self.options = options or self.Options()

    @abstractmethod
    def save(self, state: State, path: str) -> None:
        """Save `state` under `path`, a file or a directory to be made, or `s3://bucket/key`."""

    @abstractmethod
    def restore(self, path: str, wanted: State) -> State:
        """The tensors of `wanted` (given on the meta device) in memory, read from `path`.

        All their bytes have come from storage on return: nothing is mapped. May give more tensors
        than are wanted where the peer cannot restore some alone.
        """

    def available(self, target: str) -> Availability:  # noqa: ARG002
        """Whether it works here: its modules can be imported."""
        for module in self.modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                return self._missing(f"{error}.")
        return Availability(ok=True)

    def glance(self) -> Availability:
        """`available` as far as a moment tells: nothing is imported or built for it."""
        for module in self.modules:
            name = module.partition(".")[0]
            if importlib.util.find_spec(name) is None:
                return self._missing(f"No module named {name!r}.")
        return Availability(ok=True)

    def _missing(self, reason: str) -> Availability:
        return Availability(ok=False, reason=reason, remedy=f"Type: pip install {self.packages}.")

    def check_scheme(self, target: object) -> None:
        """Raise UsageError for a target of a kind that this peer does not take."""
        scheme, separator, _ = str(target).partition("://")
        if (scheme if separator else "file") not in self.schemes:
            kind = "a directory" if "file" in self.schemes else "a target s3://bucket/prefix"
            raise UsageError(f"{target}: peer:{self.name} needs {kind}")

    def require(self, target: object) -> None:
        """Raise UnavailableError with reason and remedy unless `available(target)`."""
        answer = self.available(str(target))
        if not answer.ok:
            raise UnavailableError(f"peer:{self.name}", answer.reason, answer.remedy)
