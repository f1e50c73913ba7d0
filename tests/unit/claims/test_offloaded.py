"""The claims of offloaded checkpoints: each answer, from given figures."""

from __future__ import annotations

from dataclasses import replace

from iobench.claims.claims import Answer
from iobench.claims.offloaded import judge_offload
from iobench.train.optimizer_record import MeasuredCheckpoint, MeasuredOptimizer, MeasuredRestore

_STATE = 14_000_000


def _measured(
    name: str, method: str, *, written: int, read: int, second: float
) -> MeasuredOptimizer:
    rounds = range(6)
    return MeasuredOptimizer(
        name=name,
        step_s=(1.0,),
        update_s=(1.0,),
        written_bytes_per_step=(0.0,),
        memory_bytes=0,
        checkpoints=tuple(
            MeasuredCheckpoint(
                method=method,
                repetition=n,
                stall_s=0.1,
                durable_s=0.2,
                written_bytes=written,
                device_bytes=None,
            )
            for n in rounds
        ),
        restores=tuple(
            MeasuredRestore(
                method=method,
                repetition=n,
                cached_bytes=0,
                elapsed_s=second * (1 + n / 100),
                read_bytes=read,
                device_bytes=read,
                equal=True,
            )
            for n in rounds
        ),
        losses_equal=True,
    )


_OFFLOAD = _measured("offload", "pin", written=20_480, read=2_010_000, second=0.2)
_SAVED = _measured("resident", "checkpointer", written=_STATE, read=_STATE, second=1.0)
_STOCK = _measured("resident", "torch-save", written=_STATE, read=_STATE, second=0.1)
_RESIDENT = replace(
    _SAVED,
    checkpoints=_SAVED.checkpoints + _STOCK.checkpoints,
    restores=_SAVED.restores + _STOCK.restores,
)


def test_claims_that_hold() -> None:
    """A record for a checkpoint, 2 of 14 bytes for a restore, and each ratio of seconds."""
    pin, read, sooner, later = judge_offload([_OFFLOAD, _RESIDENT], _STATE)
    assert (pin.answer, pin.ours) == (Answer.YES, "20,480 B of 14,000,000 B (0.146%)")
    assert (read.answer, read.reason) == (Answer.YES, "2 of 14 bytes by the device's counter")
    assert (sooner.answer, sooner.ours[:5]) == (Answer.YES, "5.00x")
    assert (later.answer, later.ours[:5]) == (Answer.NO, "0.50x")


def test_claims_that_do_not_hold() -> None:
    """A copied state, and a restore of all of it; a device that others use decides nothing."""
    copied = _measured("offload", "pin", written=_STATE, read=_STATE, second=1.0)
    pin, read, equal, _ = judge_offload([copied, _RESIDENT], _STATE)
    assert (pin.answer, read.answer, equal.answer) == (Answer.NO, Answer.NO, Answer.UNDECIDED)
    busy = tuple(replace(one, device_bytes=9_000_000) for one in _OFFLOAD.restores)
    _, read, _, _ = judge_offload([replace(_OFFLOAD, restores=busy), _RESIDENT], _STATE)
    assert (read.answer, read.reason[:25]) == (Answer.UNDECIDED, "this process read 14.4%; ")
    without = tuple(replace(one, device_bytes=None) for one in _OFFLOAD.restores)
    _, read, _, _ = judge_offload([replace(_OFFLOAD, restores=without), _RESIDENT], _STATE)
    assert (read.answer, read.reason[-20:]) == (Answer.YES, "; there is no device")
