"""peer:obstore: the Rust object_store through obstore; safetensors bytes, multipart uploads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from iobench.peers.base import Peer, State
from iobench.peers.s3_session import endpoint_url, region
from iobench.units import MIB
from iobench.writers.options import WriterOptions, option
from iobench.writers.s3_store.target import S3Target

__all__ = ["Obstore"]


@dataclass(frozen=True, kw_only=True)
class ObstoreOptions(WriterOptions):
    """Options of `obstore`; those of its `put`."""

    chunk_size: int = option(16 * MIB, unit="bytes", help="Part size.", low=5 * MIB)
    max_concurrency: int = option(12, help="Parts at once.", low=1, high=256)


class Obstore(Peer):
    """`safetensors.torch.save` to bytes and one `put`; ranged gets side by side, and `load`."""

    name = "obstore"
    summary = "obstore: put (multipart) and get_ranges of safetensors bytes"
    schemes = ("s3",)
    syncs = True
    modules = ("obstore", "safetensors.torch")
    packages = "obstore safetensors"
    Options = ObstoreOptions
    options: ObstoreOptions

    def save(self, state: State, path: str) -> None:
        import obstore
        from safetensors.torch import save

        place = S3Target.object(path)
        obstore.put(
            self._store(place.bucket),
            place.key,
            save(dict(state)),
            chunk_size=self.options.chunk_size,
            max_concurrency=self.options.max_concurrency,
        )

    def restore(self, path: str, wanted: State) -> State:  # noqa: ARG002
        import obstore
        from safetensors.torch import load

        place = S3Target.object(path)
        store, chunk = self._store(place.bucket), self.options.chunk_size
        size = obstore.head(store, place.key)["size"]
        if size <= chunk:
            return load(bytes(obstore.get(store, place.key).bytes()))
        starts = list(range(0, size, chunk))
        ends = [min(start + chunk, size) for start in starts]
        return load(b"".join(obstore.get_ranges(store, place.key, starts=starts, ends=ends)))

    @cached_property
    def _stores(self) -> dict[str, Any]:
        return {}

    def _store(self, bucket: str) -> Any:
        from obstore.store import S3Store

        if bucket not in self._stores:
            endpoint = endpoint_url()  # logins it finds by itself, by AWS's usual variables
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
