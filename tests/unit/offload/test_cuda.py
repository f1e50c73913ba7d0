"""CUDA parameters: gradients and values pass through pinned memory. Skipped without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.offload_training import (
    OPTIONS,
    VALUES,
    assert_equal,
    gradient,
    make_parameters,
    snapshot,
    stock_snapshots,
)

from iobench.offload import AdamW

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("overlap", [False, True])
def test_same_bits(overlap: bool, tmp_path: Path) -> None:
    """The bits of the same training on the host."""
    parameters = [torch.nn.Parameter(p.detach().cuda()) for p in make_parameters()]
    options = OPTIONS | {"overlap": overlap}
    with AdamW(parameters, tmp_path, **VALUES, **options) as optimizer:
        for step in range(4):
            optimizer.zero_grad()
            loss = torch.zeros((), device="cuda")
            for index, parameter in enumerate(parameters):
                host = gradient(torch.empty_like(parameter, device="cpu"), step, index)
                loss = loss + (parameter * host.cuda()).sum()
            loss.backward()
            optimizer.step()
        found = [{k: v.cpu() for k, v in one.items()} for one in snapshot(optimizer)]
    assert_equal(found, stock_snapshots(4)[-1])
    with AdamW.resume(parameters, tmp_path) as again:
        assert again.updates == 4
