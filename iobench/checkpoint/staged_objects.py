"""StagedObjects: a checkpoint under a prefix of an object store; its manifest is the commit.

Object stores have no rename. The files are written under the checkpoint's final prefix, the
manifest last. A prefix without a manifest is not a checkpoint. Every object is durable after its
upload.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from iobench.checkpoint.manifest import MANIFEST
from iobench.errors import IobenchError, TargetError
from iobench.writers.base import Writer
from iobench.writers.image import FileImage
from iobench.writers.s3_store.target import S3Target
from iobench.writers.s3_store.upload import leaves_failed

__all__ = ["SERIAL", "StagedObjects"]

SERIAL = "serial-"
"""Begin of the name of the object that says the serial number of a checkpoint, such as serial-7."""


class StagedObjects:
    """The prefix `final` for the objects; `publish` makes it a checkpoint.

    With a `serial`, an empty object has it in its name, which a listing of the bucket returns: the
    age order is known without a read of every manifest.

    Use it as a context manager. An exit without `publish` deletes everything written and aborts
    unfinished uploads; inside `leaving_failed`, only after a `publish` that failed. Raises
    TargetError when `final` has objects already.
    """

    spare = None

    def __init__(self, final: str, writer: Writer, *, serial: int | None = None) -> None:
        self.directory = final
        self._writer, self._serial = writer, serial
        prefix = S3Target.parse(final)
        self._prefix, self._objects = prefix, writer.objects(final)
        self._manifest = prefix.below(MANIFEST).key
        self._may_be_visible = self.published = False

    def __enter__(self) -> Self:
        if self._objects.keys():
            raise TargetError(
                f"{self.directory} exists; a checkpoint never replaces another in place"
            )
        return self

    def remove(self, names: Iterable[str]) -> None:
        """Delete the objects of these names. Raises TransferError."""
        self._objects.delete([self._prefix.below(name).key for name in names])

    def publish(self, manifest: Iterable[bytes]) -> None:
        """Write the manifest. On return the checkpoint is visible and durable.

        Raises TransferError; then there is no checkpoint.
        """
        self._may_be_visible = True
        if self._serial is not None:
            self._writer.write(FileImage.of(f"{SERIAL}{self._serial}", []), self.directory)
        self._writer.write(FileImage.of(MANIFEST, [b"".join(manifest)]), self.directory)
        self.published = True

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self.published or (leaves_failed() and not self._may_be_visible):
            return
        try:
            # The manifest first: without it the other files are not a checkpoint. It may exist even
            # if its upload raised, because the answer can be lost.
            self._objects.delete([self._manifest])
            self._objects.remove()
        except IobenchError as failure:
            if error is None:
                raise
            error.add_note(f"{self.directory}: what was written could not be removed ({failure})")
