"""Peer: base class of other projects' ways to save and restore a state dict."""

from __future__ import annotations

import importlib
import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from iobench.errors import UnavailableError, UsageError
from iobench.writers.base import Availability
from iobench.writers.options import WriterOptions

if TYPE_CHECKING:
    import torch

OWN_SERVER = "IOBENCH_S3_SERVER"
"""Environment variable with the name of the server that this process started, if any."""

State = Mapping[str, "torch.Tensor"]
"""Tensors by name; flat, dense and on the CPU."""


class NoOptions(WriterOptions):
    """Options of a peer without options."""


class Peer(ABC):
    """Saves and restores one state dict per path. Used from one thread.

    `syncs`: whether the peer itself makes its files durable before `save` returns. If not, the
    bench syncs them before it stops the clock. `saves` is False for a peer that only restores; the
    bench gives it safetensors files. `modules` must be importable; `packages` are their names for
    pip.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `iobench writers`."""
    schemes: ClassVar[tuple[str, ...]] = ("file",)
    saves: ClassVar[bool] = True
    syncs: ClassVar[bool] = False
    trains: ClassVar[bool] = False
    """Whether it saves the state of a training: nested, with values that are no tensors."""
    suffix: ClassVar[str] = ""
    """Suffix of the peer's file names; some libraries require one."""
    maps_files: ClassVar[bool] = False
    """Whether `save` or `restore` maps the files: mapped pages are in the page cache, and must not
    also count as memory of the process."""
    modules: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[str] = ""
    Options: ClassVar[type[WriterOptions]] = NoOptions

    def __init__(self, options: WriterOptions | None = None) -> None:
        self.options = options or self.Options()

    @property
    def together(self) -> bool:
        """Whether the ranks of a launcher restore a file together, after `join`."""
        return False

    def join(self) -> None:  # noqa: B027 -- few connect
        """Connect with the same peer in the other ranks, which call it too."""

    def leave(self) -> None:  # noqa: B027 -- few connect
        """End what `join` began."""

    @abstractmethod
    def save(self, state: State, path: str) -> None:
        """Save `state` to `path`: a new file, a new directory, or `s3://bucket/key`."""

    @abstractmethod
    def restore(self, path: str, wanted: State) -> State:
        """Return the tensors of `wanted` (given on the meta device), read from `path`.

        On return all their bytes are in memory, not mapped. The result may have more tensors if the
        peer cannot restore only some.
        """

    def save_async(self, state: Any, path: str) -> Callable[[], None]:
        """Begin to save the state of a training; return the function that ends it.

        After the return `state` may change. Here it is copied to new host memory, and the function,
        which another thread may call, saves the copy.
        """
        import torch
        from torch.utils import _pytree

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(tensor, device="cpu").copy_(tensor)

        copy = _pytree.tree_map_only(torch.Tensor, copied, state)
        return lambda: self.save(copy, path)

    def restore_slices(
        self, path: str, wanted: State, slices: Mapping[str, tuple[slice, ...]]
    ) -> State:
        """Return the `slices` of the tensors of `wanted`, in memory of their own.

        A peer that reads whole tensors reads them here too, and cuts them in memory.
        """
        found = self.restore(path, wanted)
        return {name: found[name][index].clone() for name, index in slices.items()}

    refused_by: ClassVar[Mapping[str, str]] = {}
    """Why it does not work with a server of ours, by the server's name."""

    def available(self, target: str) -> Availability:  # noqa: ARG002
        """Whether the peer works here: its modules can be imported, and the server suits it."""
        if reason := self.refused_by.get(os.environ.get(OWN_SERVER, "")):
            return Availability(
                ok=False, reason=reason, remedy="Give the --target of another store."
            )
        for module in self.modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                return self._missing(f"{error}.")
        self.connect()
        return Availability(ok=True)

    def connect(self) -> None:  # noqa: B027 -- few have something to make
        """Make what is made once, before the clock runs, such as a client."""

    def glance(self) -> Availability:
        """A quick estimate of `available` that imports and builds nothing."""
        for module in self.modules:
            name = module.partition(".")[0]
            if importlib.util.find_spec(name) is None:
                return self._missing(f"No module named {name!r}.")
        return Availability(ok=True)

    def _missing(self, reason: str) -> Availability:
        return Availability(ok=False, reason=reason, remedy=f"Type: pip install {self.packages}.")

    def check_scheme(self, target: object) -> None:
        """Raise UsageError if the peer cannot save to this kind of target."""
        scheme, separator, _ = str(target).partition("://")
        if (scheme if separator else "file") not in self.schemes:
            kind = "a directory" if "file" in self.schemes else "a target s3://bucket/prefix"
            raise UsageError(f"{target}: peer:{self.name} needs {kind}")

    def require(self, target: object) -> None:
        """Raise UnavailableError with reason and remedy unless the peer is available."""
        answer = self.available(str(target))
        if not answer.ok:
            raise UnavailableError(f"peer:{self.name}", answer.reason, answer.remedy)


def endpoint_url() -> str | None:
    """Return the URL of the store; None for Amazon's own."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def region() -> str:
    """Return the region, by default us-east-1; stores other than Amazon's accept any region."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
