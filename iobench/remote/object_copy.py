"""ObjectCopy: a checkpoint that is being copied to a bucket."""

from __future__ import annotations

import errno
import hashlib
from typing import Any

from iobench.checkpoint.manifest import Manifest
from iobench.checkpoint.object_store import StagedObjects
from iobench.checkpoint.rate_limit import RateLimit
from iobench.errors import TransferError
from iobench.remote.source_file import SourceFile
from iobench.writers.blocks.workers import Blocks, run_workers
from iobench.writers.s3 import S3Writer
from iobench.writers.s3_store.objects import S3Objects
from iobench.writers.s3_store.parts import Checksum, SentPart, etag_of, part_size_for
from iobench.writers.s3_store.target import S3Target
from iobench.writers.s3_store.upload import KEPT_PART, ResumedUpload
from iobench.writers.transfer import Meter


class ObjectCopy:
    """A RemoteCopy under `prefix` of a bucket.

    The server itself says what it has: objects and the parts of unfinished uploads. They count only
    if their checksums are those of the source.
    """

    def __init__(self, prefix: str, writer: S3Writer, *, serial: int, limit: RateLimit) -> None:
        self._prefix, self._writer = S3Target.parse(prefix), writer
        self._staged = StagedObjects(prefix, writer, serial=serial)
        self._limit = limit

    def send(self, source: SourceFile) -> int:
        options, size = self._writer.options, source.size_bytes
        place = self._prefix.below(source.name)
        part_size = part_size_for(size, fixed_bytes=options.part_size, threads=options.threads)
        if self._has(place, source, part_size):
            return 0
        meter = Meter()
        checksum = Checksum.named(options.checksum)
        upload = ResumedUpload(self._writer.client, place, checksum)
        try:
            if size <= part_size:
                with self._limit.moving(size):
                    upload.put([source.read(0, size)], meter)
            else:
                upload.begin(meter)
                self._send_parts(upload, source, part_size, meter)
                upload.complete(meter)
        finally:
            upload.leave()
        kept = meter.paths.get(KEPT_PART)
        return size - (kept.bytes if kept else 0)

    def _send_parts(
        self, upload: ResumedUpload, source: SourceFile, part_size: int, meter: Meter
    ) -> None:
        def work(blocks: Blocks, own: Meter) -> None:
            for start, stop in blocks:
                with self._limit.moving(stop - start):
                    upload.send(start // part_size + 1, [source.read(start, stop)], own)

        parts = Blocks([(0, source.size_bytes)], part_size)
        run_workers(self._writer.options.threads, parts, work, meter)

    def check(self, name: str, size_bytes: int) -> None:
        """Do nothing: a bucket is one place, and the store has answered with the checksum."""

    def publish(self, manifest: bytes) -> None:
        self._remove_others(Manifest.parse(manifest, str(self._staged.directory)))
        self._staged.publish([manifest])

    def _remove_others(self, manifest: Manifest) -> None:
        """Delete objects of other names: a direct save that failed may have left them."""
        wanted = {self._prefix.below(file.path).key for file in manifest.remote_files}
        objects = S3Objects(self._writer.client, self._prefix)
        found = objects.keys()
        if others := [key for key in found if key not in wanted]:
            objects.delete(others)

    def _has(self, place: S3Target, source: SourceFile, part_size: int) -> bool:
        """Return whether the store has the file already: by checksum, or else by ETag."""

        def head(s3: Any) -> Any:
            return s3.head_object(Bucket=place.bucket, Key=place.key, ChecksumMode="ENABLED")

        try:
            found = self._writer.client.call(head, Meter(), doing="looking for", where=place)
        except TransferError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        if found.get("ContentLength") != source.size_bytes:
            return False
        stored = Checksum.of_object(found)
        if stored is not None:
            checksum, text = stored
            value = 0
            for block in source.blocks():
                value = checksum.update(block, value)
            return checksum.text(value) == text
        return str(found.get("ETag")).strip('"') == _etag(source, part_size)


def _etag(source: SourceFile, part_size: int) -> str:
    """Return the ETag that most stores give to the file: an MD5, or one of MD5s of its parts."""
    digests = [
        hashlib.md5(block.data, usedforsecurity=False).hexdigest()
        for block in source.blocks(part_size)
    ]
    if source.size_bytes <= part_size:
        return digests[0] if digests else hashlib.md5(usedforsecurity=False).hexdigest()
    return etag_of([SentPart(etag=one, size_bytes=0, checksum=0) for one in digests])
