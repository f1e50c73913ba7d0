"""peer:obstore: the Rust crate object_store through obstore; multipart uploads of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from iobench.peers.base import Peer, State, endpoint_url, region
from iobench.units import MIB
from iobench.writers.options import WriterOptions, option
from iobench.writers.s3_store.target import S3Target


@dataclass(frozen=True, kw_only=True)
class ObstoreOptions(WriterOptions):
    """Options of `obstore`: those of its function `put`."""

    chunk_size: int = option(16 * MIB, unit="bytes", help="Part size.", low=5 * MIB)
    max_concurrency: int = option(12, help="Concurrent parts.", low=1, high=256)


class Obstore(Peer):
    """Save: `safetensors.torch.save` and one `put`. Restore: concurrent ranged gets and `load`."""

    name = "obstore"
    summary = "obstore: put (multipart) and get_ranges of safetensors bytes"
    schemes = ("s3",)
    syncs = True
    modules = ("obstore", "safetensors.torch")
    packages = "obstore safetensors"
    refused_by: ClassVar[Mapping[str, str]] = {
        # Seen with obstore 0.12 and rclone 1.75: the body is the range, but the status is not 206.
        "rclone": "the server of --s3-local answers a ranged get with 200, not with 206."
    }
    Options = ObstoreOptions
    options: ObstoreOptions

    def save(self, state: State, path: str) -> None:
        import obstore
        from safetensors.torch import save

        target = S3Target.object(path)
        obstore.put(
            self._store(target.bucket),
            target.key,
            save(dict(state)),
            chunk_size=self.options.chunk_size,
            max_concurrency=self.options.max_concurrency,
        )

    def restore(self, path: str, wanted: State) -> State:  # noqa: ARG002
        import obstore
        from safetensors.torch import load

        target = S3Target.object(path)
        store, chunk = self._store(target.bucket), self.options.chunk_size
        size = obstore.head(store, target.key)["size"]
        if size <= chunk:
            return load(bytes(obstore.get(store, target.key).bytes()))
        starts = list(range(0, size, chunk))
        ends = [min(start + chunk, size) for start in starts]
        return load(b"".join(obstore.get_ranges(store, target.key, starts=starts, ends=ends)))

    @cached_property
    def _stores(self) -> dict[str, Any]:
        return {}

    def _store(self, bucket: str) -> Any:
        from obstore.store import S3Store

        if bucket not in self._stores:
            endpoint = endpoint_url()  # obstore reads the credentials from AWS's usual variables
            self._stores[bucket] = S3Store(
                bucket,
                region=region(),
                endpoint=endpoint,
                virtual_hosted_style_request=endpoint is None,
                client_options={
                    "allow_http": (endpoint or "").startswith("http://"),
                    "timeout": "300s",
                },
            )
        return self._stores[bucket]
