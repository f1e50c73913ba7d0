"""RemoteCopy: a checkpoint that is being copied to the remote tier, in any number of attempts."""

from __future__ import annotations

from typing import Protocol

from iobench.remote.source_file import SourceFile

__all__ = ["RemoteCopy"]


class RemoteCopy(Protocol):
    """A checkpoint on its way to the remote tier. It is visible there only after `publish`.

    What an attempt has sent stays there when it ends early, also by kill -9. The next attempt
    compares it with the source and sends only the rest.
    """

    def send(self, source: SourceFile) -> int:
        """Send one file; return the bytes sent, without those that were there already.

        The file is durable on return. Raises TransferError, DrainStoppedError.
        """

    def check(self, name: str, size_bytes: int) -> None:
        """Raise TargetError if another process sent this file to a place that is not this one."""

    def publish(self, manifest: bytes) -> None:
        """Make it a checkpoint with this manifest, durable on return. Raises TransferError."""
