"""Optimizers to compare: AdamW with its state in memory, in mapped files, and offloaded."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.adam import adam

from iobench import linux
from iobench.checkpoint.checkpointer import LocalCheckpointer
from iobench.checkpoint.retention import KeepLast
from iobench.errors import UsageError, transfer_errors
from iobench.offload import AdamW
from iobench.units import MIB
from iobench.writers.local.new_file import sync_directory

__all__ = ["OPTIMIZERS", "ComparedOptimizer", "Parameters", "optimizer_names"]

Parameters = Sequence[torch.nn.Parameter]

_LR, _BETAS, _EPS, _DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
_CHUNK = 4 * MIB
"""Elements that the mapped files are updated by, like the offload engine's chunks."""


class ComparedOptimizer(ABC):
    """AdamW on fp32 master weights of 16-bit `parameters`, with its files in `directory`.

    All of them give the same bits.
    """

    methods: tuple[str, ...]
    """Ways to make a checkpoint."""

    def __init__(self, parameters: Parameters, directory: Path, memory: str) -> None:
        self.parameters, self.directory, self.memory = parameters, directory, memory
        directory.mkdir()

    @abstractmethod
    def step(self) -> None:
        """Update the parameters by their gradients."""

    def settle(self) -> None:  # noqa: B027 -- optional
        """Wait until nothing of the steps so far is on its way."""

    @abstractmethod
    def checkpoint(self, method: str, step: int) -> Callable[[], None]:
        """Make a checkpoint; training may go on. The result waits until it is durable."""

    @abstractmethod
    def files(self, method: str) -> Path:
        """Where a restore of the last checkpoint reads."""

    @abstractmethod
    def restore(self, method: str, step: int, into: Parameters) -> Callable[[], None]:
        """Read the last checkpoint until training can go on with the parameters `into`.

        The optimizer itself is closed before. Call the result afterwards: it frees all.
        """

    def close(self) -> None:  # noqa: B027 -- optional
        """Release what it holds; called once, before any `restore`."""


class Offloaded(ComparedOptimizer):
    """State on storage; a checkpoint is a pin."""

    methods = ("pin",)

    def __init__(self, parameters: Parameters, directory: Path, memory: str) -> None:
        super().__init__(parameters, directory, memory)
        self._optimizer = AdamW(
            parameters, directory, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY,
            memory=memory,
        )  # fmt: skip

    def step(self) -> None:
        self._optimizer.step()

    def settle(self) -> None:
        self._optimizer.wait()

    def checkpoint(self, method: str, step: int) -> Callable[[], None]:  # noqa: ARG002
        self._optimizer.pin(step)
        return lambda: self._optimizer.wait(step)

    def files(self, method: str) -> Path:  # noqa: ARG002
        return self.directory

    def restore(self, method: str, step: int, into: Parameters) -> Callable[[], None]:  # noqa: ARG002
        resumed = AdamW.resume(into, self.directory, step=step, memory=self.memory)
        return resumed.close

    def close(self) -> None:
        self._optimizer.close()


class _Mastered(ComparedOptimizer):
    """Masters and moments in tensors of this process, one after the other for all parameters."""

    def __init__(self, parameters: Parameters, directory: Path, memory: str) -> None:
        super().__init__(parameters, directory, memory)
        self._elements = sum(one.numel() for one in parameters)
        self._tensors = self._allocated()
        self._steps = torch.tensor(0.0)
        with torch.no_grad():
            for own, parameter in self._own(self._tensors[0]):
                own.copy_(parameter.view(-1))

    @abstractmethod
    def _allocated(self) -> list[torch.Tensor]:
        """Return three tensors of zeros."""

    def _own(self, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.nn.Parameter]]:
        parts = tensor.split([one.numel() for one in self.parameters])
        return list(zip(parts, self.parameters, strict=True))

    def step(self) -> None:
        columns = [self._own(tensor) for tensor in self._tensors]
        with torch.no_grad():
            for rows in zip(*columns, strict=True):
                parameter = rows[0][1]
                assert parameter.grad is not None
                for start in range(0, parameter.numel(), _CHUNK):
                    part = slice(start, start + _CHUNK)
                    gradient = parameter.grad.view(-1)[part].float()
                    self._update([own[part] for own, _ in rows], gradient)
                    parameter.view(-1)[part] = rows[0][0][part]
        self._steps += 1

    def _update(self, tensors: Sequence[torch.Tensor], gradient: torch.Tensor) -> None:
        master, first, second = tensors
        adam(
            [master], [gradient], [first], [second], [], [self._steps.clone()],
            fused=True, amsgrad=False, beta1=_BETAS[0], beta2=_BETAS[1], lr=_LR,
            weight_decay=_DECAY, eps=_EPS, maximize=False, decoupled_weight_decay=True,
        )  # fmt: skip

    def _put(self, masters: torch.Tensor, into: Parameters) -> None:
        with torch.no_grad():
            parts = masters.split([one.numel() for one in into])
            for own, parameter in zip(parts, into, strict=True):
                parameter.copy_(own.view(parameter.shape))


class Resident(_Mastered):
    """State in memory; a checkpoint is a copy of all of it, by torch.save or a Checkpointer."""

    methods = ("checkpointer", "torch-save")

    def __init__(self, parameters: Parameters, directory: Path, memory: str) -> None:
        super().__init__(parameters, directory, memory)
        self._checkpointer = LocalCheckpointer(directory / "saved", slots=1, keep=KeepLast(1))

    def _allocated(self) -> list[torch.Tensor]:
        return [torch.zeros(self._elements) for _ in range(3)]

    def _state(self) -> dict[str, Any]:
        named = dict(zip(("master", "exp_avg", "exp_avg_sq"), self._tensors, strict=True))
        return {**named, "model": [one.detach() for one in self.parameters]}

    def checkpoint(self, method: str, step: int) -> Callable[[], None]:
        if method == "checkpointer":
            self._checkpointer.save_async(self._state(), step)
            return self._checkpointer.wait
        file = self._file()
        aside = file.with_suffix(".part")
        with transfer_errors("writing", file):
            torch.save(self._state(), aside)
            linux.sync_file(aside)
            aside.rename(file)
        sync_directory(self.directory)
        return lambda: None

    def _file(self) -> Path:
        return self.directory / "latest.pt"

    def files(self, method: str) -> Path:
        return self.directory / "saved" if method == "checkpointer" else self._file()

    def restore(self, method: str, step: int, into: Parameters) -> Callable[[], None]:
        if method == "checkpointer":
            with LocalCheckpointer(self.directory / "saved") as one:
                found = one.load(step)
        else:
            found = torch.load(self._file(), weights_only=True)
        with torch.no_grad():
            for parameter, value in zip(into, found["model"], strict=True):
                parameter.copy_(value)
        return lambda: None

    def close(self) -> None:
        self._checkpointer.close()
        self._tensors = []


class Mapped(_Mastered):
    """State in memory-mapped files, as people write it by hand; a checkpoint copies the files.

    A step calls no msync: the kernel writes back when it likes. So the files have no step of their
    own, and only the copy is a checkpoint.
    """

    methods = ("copy",)

    def _paths(self, folder: str) -> list[Path]:
        return [self.directory / folder / name for name in ("master", "exp_avg", "exp_avg_sq")]

    def _allocated(self) -> list[torch.Tensor]:
        made = []
        (self.directory / "state").mkdir()
        for path in self._paths("state"):
            with transfer_errors("reserving", path), path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, 4 * self._elements)
            made.append(torch.from_file(str(path), shared=True, size=self._elements))
        return made

    def checkpoint(self, method: str, step: int) -> Callable[[], None]:  # noqa: ARG002
        aside = self.directory / "aside"
        aside.mkdir()
        for path in self._paths("state"):
            linux.sync_file(path)
            with transfer_errors("copying", path):
                shutil.copyfile(path, aside / path.name)
            linux.sync_file(aside / path.name)
        last = self.directory / "copy"
        shutil.rmtree(last, ignore_errors=True)
        aside.rename(last)
        sync_directory(self.directory)
        return lambda: None

    def files(self, method: str) -> Path:  # noqa: ARG002
        return self.directory / "copy"

    def restore(self, method: str, step: int, into: Parameters) -> Callable[[], None]:  # noqa: ARG002
        elements = sum(one.numel() for one in into)
        read = [
            torch.from_file(str(path), shared=False, size=elements).clone()
            for path in self._paths("copy")
        ]
        self._put(read[0], into)
        return read.clear

    def close(self) -> None:
        self._tensors = []


OPTIMIZERS: Mapping[str, type[ComparedOptimizer]] = {
    "offload": Offloaded,
    "resident": Resident,
    "mmap": Mapped,
}


def optimizer_names(text: str) -> list[str]:
    """Return the names in `offload,resident,mmap`. Raises UsageError for others and for two."""
    names = [part.strip() for part in text.split(",")]
    unknown = [name for name in names if name not in OPTIMIZERS]
    if unknown or len(set(names)) < len(names):
        raise UsageError(f"--optimizer {text}: {', '.join(OPTIMIZERS)}, each at most once")
    return names
