"""What each layout writes: names, order and structure, and which ranks write it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from iobench import workloads
from iobench.workloads import Workload
from iobench.workloads.layouts.deepspeed import DeepSpeedZero2

_SMALL_JOBS = {
    "llama7b": {"world_size": 3},
    "llama7b-zero1": {"world_size": 3},
    "llama7b-zero3": {"world_size": 3},
    "llama7b-fsdp": {"world_size": 5},
    "llama7b-fsdp-model": {"world_size": 5},
    "llama7b-export": {},
    "gpt5b-nemo": {"tensor_parallel": 2, "pipeline_parallel": 4, "data_parallel": 3},
    "gpt5b-nemo-dist": {"tensor_parallel": 2, "pipeline_parallel": 4, "data_parallel": 3},
    "mlperf-8b": {"tensor_parallel": 2, "data_parallel": 3},
    "mlperf-405b": {"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 2},
}


@pytest.mark.parametrize("name", _SMALL_JOBS)
def test_the_total_is_the_sum_over_all_ranks(name: str, small: Callable[..., Workload]) -> None:
    """Counting classes of equal ranks gives the sum over every single rank, and no file twice."""
    workload = small(name, **_SMALL_JOBS[name])
    files = [file for rank in range(workload.world_size) for file in workload.files(rank)]
    assert workload.total_size_bytes() == sum(file.size_bytes for file in files)
    assert len({file.path for file in files}) == len(files)


@pytest.mark.parametrize("name", workloads.names())
def test_tensor_names_are_unique_and_sizes_cover_the_tensors(name: str) -> None:
    """In every workload that ships, a file's tensors have names of their own and fit into it."""
    for file in workloads.load(name).files():
        assert len({tensor.name for tensor in file.tensors}) == len(file.tensors), file.path
        overhead = file.size_bytes - file.payload_bytes
        assert (
            (overhead == 0)
            if file.format == "raw"
            else (0 < overhead < 3000 + 2000 * len(file.tensors))
        )


@pytest.mark.parametrize(
    ("name", "bytes_each"),
    [("llama7b", 12), ("llama7b-zero1", 14), ("llama7b-zero3", 12), ("llama7b-fsdp", 12),
     ("llama7b-fsdp-model", 2), ("llama7b-export", 2),
     ("gpt5b-nemo", 14), ("gpt5b-nemo-dist", 14)],
)  # fmt: skip
def test_bytes_per_parameter_are_the_textbook_s(name: str, bytes_each: int) -> None:
    """Weights and optimizer come to the bytes per parameter that the layout is known for."""
    assert workloads.load(name).bytes_per_parameter == pytest.approx(bytes_each, rel=0.003)


def test_trainer_order_and_ranks() -> None:
    """The Trainer writes weights before the optimizer and its state last; others only their rng."""
    workload = workloads.load("llama7b")
    paths = [file.path for file in workload.files()]
    assert paths.index("config.json") < paths.index("model-00001-of-00006.safetensors")
    assert paths.index("model.safetensors.index.json") < paths.index("optimizer.pt")
    assert paths[-3:] == ["scheduler.pt", "rng_state_0.pth", "trainer_state.json"]
    assert [file.path for file in workload.files(7)] == ["rng_state_7.pth"]


def test_trainer_optimizer_is_what_adamw_saves(small: Callable[..., Workload]) -> None:
    """optimizer.pt has the keys, dtypes and shapes of torch's AdamW state dict, in its order."""
    workload = small("llama7b", layers=2)
    parameters = [torch.nn.Parameter(torch.zeros(p.shape)) for p in workload.model.parameters()]
    decaying = [p for p in parameters if p.ndim > 1]
    others = [p for p in parameters if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": decaying}, {"params": others, "weight_decay": 0.0}])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    expected = [
        (f"state/{index}/{key}", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for index, state in optimizer.state_dict()["state"].items()
        for key, tensor in state.items()
    ]
    file = next(file for file in workload.files() if file.path == "optimizer.pt")
    assert [(t.name, t.dtype, t.shape) for t in file.tensors] == expected


def test_files_of_deepspeed(small: Callable[..., Workload]) -> None:
    """Stage 2 differs in memory only. Only bf16 runs mark their optimizer files."""
    stage1 = workloads.load("llama7b-zero1")
    stage2 = DeepSpeedZero2(world_size=stage1.world_size)
    for rank in range(stage1.world_size):
        assert stage2.files(stage1.model, rank) == stage1.files(rank)
    paths = [file.path for file in small("llama7b-zero1", precision="fp16").files(2)]
    assert paths == ["global_step1000/zero_pp_rank_2_mp_rank_00_optim_states.pt"]


def test_zero3_cuts_large_partitions_into_sub_groups() -> None:
    """A 70B model on 64 ranks has over 10^9 elements of matrices per rank: two sub groups."""
    workload = workloads.load("llama3-70b")
    optimizer = next(f for f in workload.files() if "optim_states" in f.path)
    masters = [t for t in optimizer.tensors if "fp32_flat_groups" in t.name]
    assert len(masters) == 3  # two of matrices, one of norms
    assert max(t.elements for t in masters) < 1.1e9


def test_megatron_ranks_and_stages(small: Callable[..., Workload]) -> None:
    """Tensor ranks count first, data rank 0 writes, the end stages have embedding and output."""
    workload = small("gpt5b-nemo", tensor_parallel=2, pipeline_parallel=4, data_parallel=3)
    writers = {rank: workload.files(rank) for rank in range(24) if workload.files(rank)}
    assert list(writers) == [0, 1, 6, 7, 12, 13, 18, 19]
    assert writers[19][0].path == "iter_0001000/mp_rank_01_003/model_optim_rng.pt"
    assert writers[0][-1].path == "latest_checkpointed_iteration.txt"
    for rank, has in ((0, "word_embeddings"), (19, "output_layer")):
        assert [t.name for t in writers[rank][0].tensors if has in t.name]
        assert not [t.name for t in writers[6][0].tensors if has in t.name]
    names = [t.name for t in writers[0][0].tensors]
    assert names.index("model/decoder.layers.0.mlp.linear_fc2.bias") < names.index(
        "optimizer/optimizer/state/0/exp_avg"
    ) < names.index("optimizer/fp32_from_fp16_params/0/0")  # fmt: skip


def test_torch_dist_saves_every_element_once(small: Callable[..., Workload]) -> None:
    """All ranks together hold each weight once, and three fp32 values for it."""
    fields = {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 3}
    workload = small("gpt5b-nemo-dist", **fields)
    tensors = [t for rank in range(12) for f in workload.files(rank) for t in f.tensors
               if f.format == "dcp"]  # fmt: skip
    weights = sum(t.elements for t in tensors if t.dtype == "bfloat16")
    states = sum(t.elements for t in tensors if t.dtype == "float32")
    assert weights == workload.parameters
    assert states == 3 * workload.parameters


def test_mlperf_saves_layer_by_layer_under_pipelining() -> None:
    """The 405B workload has a file per layer on data rank 0, and optimizer files everywhere."""
    workload = workloads.load("mlperf-405b")
    first = [file.path.partition("/")[2] for file in workload.files(0)]
    assert first == [f"layer_{i}-model_0_model_states.pt" for i in range(5)] + [
        "zero_pp_rank_0_mp_rank_0_optim_states.pt"
    ]
    last = [file.path.partition("/")[2] for file in workload.files(255)]
    assert last == [f"layer_{i}-model_255_model_states.pt" for i in range(124, 129)] + [
        "zero_pp_rank_0_mp_rank_255_optim_states.pt"
    ]
    assert [f.path.partition("/")[2] for f in workload.files(256)] == [
        "zero_pp_rank_1_mp_rank_0_optim_states.pt"
    ]
