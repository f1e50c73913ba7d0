"""ObjectStore: checkpoints under a prefix of a bucket. A manifest object makes one complete.

Object stores have no rename. The replacement of `step-2` is `step-2.1`; then `step-2` is removed.
The empty object `step-2/serial-7` says the serial number of its manifest in a listing.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Self

from iobench.checkpoint.manifest import MANIFEST, Manifest, name_of
from iobench.errors import DataMismatchError, IobenchError, TargetError, TransferError
from iobench.writers.base import StoredObjects, Writer
from iobench.writers.image import FileImage
from iobench.writers.removal import remove_all, warn_of
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.target import S3Target

SERIAL = "serial-"
"""Begin of the name of the object that says the serial number of a checkpoint, such as serial-7."""


class StagedObjects:
    """The prefix `final` for the objects; `publish` makes it a checkpoint.

    With a `serial`, an empty object has it in its name, which a listing of the bucket returns: the
    age order is known without a read of every manifest.

    Use it as a context manager. An exit without `publish` deletes everything written and aborts
    unfinished uploads; inside `TimeLimit.within`, only after a `publish` that failed. Raises
    TargetError when `final` has objects already.
    """

    def __init__(self, final: str, writer: Writer, *, serial: int | None = None) -> None:
        self.directory = final
        self._writer, self._serial = writer, serial
        self._limit = writer.client.time_limit if isinstance(writer, S3Writer) else None
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

        A time limit of the writer ends here: whether the manifest is visible must be known. Raises
        TransferError, also if the limit has passed; then there is no checkpoint.
        """
        if self._limit is not None and not self._limit.lift():
            raise TransferError(f"{self.directory}: the time limit has passed")
        self._may_be_visible = True
        if self._serial is not None:
            self._writer.write(FileImage.of(f"{SERIAL}{self._serial}", []), self.directory)
        self._writer.write(FileImage.of(MANIFEST, [b"".join(manifest)]), self.directory)
        self.published = True

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        leaves = self._limit is not None and self._limit.leaves_failed
        if self.published or (leaves and not self._may_be_visible):
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


_Place = tuple[int, int]
"""A step and the number of its replacements."""

_ATTEMPTS = 10**9

_NAME = re.compile(r"step-(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")


class ObjectStore:
    """Checkpoints of one run under a prefix. There is no lock: only one process may write to it."""

    readers = 16

    def __init__(self, location: str, writer: Writer) -> None:
        self._place, self._writer = S3Target.parse(location), writer
        writer.objects(location)  # raises UsageError where the writer has no list and no deletion
        self._newest: dict[int, int] = {}  # step -> newest number, as of the last listing
        self._serials: dict[int, int] = {}

    def __str__(self) -> str:
        return str(self._place)

    def using(self, writer: Writer) -> ObjectStore:
        """Return the same checkpoints through another writer, for the next save."""
        other = copy.copy(self)
        other._writer = writer
        return other

    def acquire(self) -> None:
        """Do nothing: object stores have no locks."""

    def release(self) -> None:
        """Do nothing: there is no lock to release."""

    def steps(self) -> list[int]:
        found = self._found()
        self._newest = _newest(found)
        named = {step: _serials(found[step, number]) for step, number in self._newest.items()}
        self._serials = {step: serials[0] for step, serials in named.items() if len(serials) == 1}
        return sorted(self._newest)

    def serials(self) -> dict[int, int]:
        return dict(self._serials)

    def manifest(self, step: int, *, files: bool = True) -> Manifest:
        where = f"{self.locate(step)}/{MANIFEST}"
        with closing(self._writer.open_source(where)) as source:
            # Source.read(-1) reads range by range: a size that the server reports may be wrong,
            # and only its ranges prove it.
            manifest = Manifest.parse(source.read(-1), where, files=files)
        named = self._serials.get(step, manifest.serial)
        if named != manifest.serial:
            raise DataMismatchError(
                f"{where}: has the serial number {manifest.serial}, and the object {SERIAL}{named} "
                "is next to it"
            )
        return manifest

    def locate(self, step: int) -> str:
        return str(self._at(step, self._newest.get(step, 0)))

    @contextmanager
    def staged(
        self, step: int, *, serial: int, replace: bool = False, shared: bool = False
    ) -> Iterator[StagedObjects]:
        older = self._numbers(step) if replace else []
        number = max(older, default=-1) + 1
        if shared:  # the next multiple, and random digits that no earlier attempt has
            number = (number // _ATTEMPTS + 1) * _ATTEMPTS + secrets.randbelow(_ATTEMPTS)
        prefix = str(self._at(step, number))
        with StagedObjects(prefix, self._writer, serial=serial) as staged:
            try:
                yield staged
            finally:
                if staged.published:
                    self._newest[step], self._serials[step] = number, serial
                    left = [(step, number) for number in older]
                    warn_of(remove_all({step: partial(self._remove, left)}).values())

    def unfinished(self, step: int) -> str:
        """Return the prefix of the step's unfinished checkpoint, or of its next one."""
        found = self._found()
        newest = _newest(found).get(step, -1)
        later = [number for other, number in found if other == step and number > newest]
        return str(self._at(step, max(later, default=newest + 1)))

    def remove(self, step: int) -> None:
        self._remove([(step, number) for number in self._numbers(step)])

    def clean(self, spare: Container[int] = ()) -> None:
        """Remove what is not a checkpoint, and replaced ones. Unfinished ones of `spare` stay."""
        found = self._found()
        newest = _newest(found)
        left = [
            (step, number)
            for step, number in found
            if newest.get(step) != number and not (step in spare and number > newest.get(step, -1))
        ]
        removals = {place: partial(self._remove, [place]) for place in left}
        warn_of(remove_all(removals).values())

    def _at(self, step: int, number: int) -> S3Target:
        """Return the prefix of the step's checkpoint after `number` replacements."""
        return self._place.below(f"{name_of(step)}.{number}" if number else name_of(step))

    def _numbers(self, step: int) -> list[int]:
        """Return the numbers of the step's checkpoints. A killed process can leave several."""
        names = self._objects(self._place).names(name_of(step))
        found = (_parsed(name) for name in names)
        return sorted(place[1] for place in found if place and place[0] == step)

    def _remove(self, places: Sequence[_Place]) -> None:
        """Delete all manifests first: a prefix without a manifest is not a checkpoint."""
        manifests = [self._at(*place).below(MANIFEST).key for place in places]
        self._objects(self._place).delete(manifests)
        for place in places:
            self._objects(self._at(*place)).remove()

    def _objects(self, place: S3Target) -> StoredObjects:
        return self._writer.objects(str(place))

    def _found(self) -> dict[_Place, set[str]]:
        """Return every (step, number) that has objects or uploads, and the names of the objects."""
        objects = self._objects(self._place)
        # An unfinished upload is not an object: a large manifest is uploaded in parts.
        stored = set(objects.keys())
        found: dict[_Place, set[str]] = {}
        for key in stored.union(objects.unfinished()):
            name, _, file = key.removeprefix(self._place.key).strip("/").partition("/")
            place = _parsed(name)
            if place is not None:
                found.setdefault(place, set()).update({file} if key in stored else ())
        return found


def _parsed(name: str) -> _Place | None:
    """Return the step and the number in a name; None for another name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def _newest(found: dict[_Place, set[str]]) -> dict[int, int]:
    """Return step -> number of its newest complete checkpoint."""
    return {step: number for (step, number) in sorted(found) if MANIFEST in found[step, number]}


def _serials(names: set[str]) -> list[int]:
    """Return the serial numbers in the names of a checkpoint's objects: one, or none of older ones.

    The manifest decides where there are several.
    """
    ends = [name.removeprefix(SERIAL) for name in names if name.startswith(SERIAL)]
    return [int(end) for end in ends if end.isdecimal()]
