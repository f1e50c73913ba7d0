"""GivenTiers: the tiers of a Checkpointer, checked and sorted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from iobench.errors import OptionError
from iobench.remote.memory import Memory
from iobench.remote.remote import Remote

AnyTier: TypeAlias = "Memory | Remote"


@dataclass(frozen=True, kw_only=True)
class GivenTiers:
    """Memory tiers, fastest first, and the remote one, if they were given."""

    memories: tuple[Memory, ...] = ()
    remote: Remote | None = None

    @classmethod
    def of(cls, tiers: Sequence[AnyTier]) -> GivenTiers:
        """Sort `tiers`. Raises OptionError for anything else, another order, or two remote ones."""
        kinds = Memory | Remote
        if not isinstance(tiers, Sequence) or not all(isinstance(one, kinds) for one in tiers):
            raise OptionError(
                f'tiers={tiers!r}: takes a list such as [Memory("8GiB"), Remote("s3://bucket/run")]'
            )
        memories = [one for one in tiers if isinstance(one, Memory)]
        remote = [one for one in tiers if isinstance(one, Remote)]
        if len(remote) > 1:
            raise OptionError(f"tiers: {len(remote)} remote tiers; one is possible")
        if remote and tiers[-1] is not remote[0]:
            raise OptionError("tiers: the order is Memory, Remote: the nearest tier first")
        names = [str(one) for one in memories]
        if len(set(names)) < len(names):
            raise OptionError(f"tiers: the same memory twice: {', '.join(names)}")
        return cls(memories=tuple(memories), remote=remote[0] if remote else None)

    def check(self, options: Mapping[str, Any], *, ranked: bool) -> None:
        """Raise OptionError if a Checkpointer with `options` cannot use them."""
        if ranked and options.get("placement") and options.get("replicate"):
            raise OptionError("placement: not with replicate in a job of several ranks")
        for name in ("slots", "budget"):
            if self.memories and options.get(name) is not None:
                raise OptionError(f"{name}: the sizes of the Memory tiers decide; leave it out")
