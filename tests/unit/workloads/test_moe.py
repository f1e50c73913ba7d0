"""Mixtures of experts: transformers' own files, expert parallelism, and scaling."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from iobench import workloads
from iobench.workloads.layouts import LAYOUTS
from iobench.workloads.models.model import Model

_SMALL = {"vocab_size": 96, "hidden_size": 64, "num_layers": 3, "num_heads": 4, "num_experts": 4}
_SMALL_OF = {
    "mixtral-8x7b": {"num_kv_heads": 2, "ffn_hidden_size": 32, "expert_ffn_size": 32},
    "qwen3-30b-a3b": {
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_hidden_size": 96,
        "expert_ffn_size": 32,
    },
    "deepseek-v3": {
        "ffn_hidden_size": 96,
        "expert_ffn_size": 32,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    },
}
_CONFIGS = {
    "mixtral-8x7b": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3-30b-a3b": ("Qwen3MoeConfig", {"num_experts": 4, "moe_intermediate_size": 32}),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 4,
        },
    ),
}


def _small(name: str) -> Model:
    model = workloads.load_model(name)
    return replace(model, arch=replace(model.arch, **_SMALL, **_SMALL_OF[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", _SMALL_OF)
def test_transformers_saves_the_same_tensors(name: str, tmp_path: Path) -> None:
    """save_pretrained of a small model of the family: every name and every shape."""
    transformers = pytest.importorskip("transformers")
    model = _small(name)
    kind, own = _CONFIGS[name]
    arch = model.arch
    shared: dict[str, Any] = {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "intermediate_size": arch.ffn_hidden_size,
        "tie_word_embeddings": False,
    }
    for ours, theirs in (
        ("num_kv_heads", "num_key_value_heads"),
        *((one, one) for one in ("head_dim", "q_lora_rank", "kv_lora_rank", "v_head_dim")),
        *((one, one) for one in ("qk_nope_head_dim", "qk_rope_head_dim")),
    ):
        if (value := getattr(arch, ours)) is not None:
            shared[theirs] = value
    config = getattr(transformers, kind)(**shared | own)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in (*file.keys(),)}
    assert {p.name: p.shape for p in model.parameters()} == saved


def test_layers_without_experts_come_first() -> None:
    """DeepSeek-V3 has three layers with one network, and 58 with 256 experts and a shared one. Of
    its 61 layers 3 are dense: of 20 layers one is, and of one none."""
    model = workloads.load_model("deepseek-v3")
    assert model.layer_kinds() == [(0, 3), (3, 58)]
    assert not any("experts" in p.name for p in model.layer(2))
    assert Counter(p.expert is not None for p in model.layer(3)) == {True: 3 * 256, False: 14}
    assert [p.name for p in model.layer(60) if not p.trained] == [
        "model.layers.60.mlp.gate.e_score_correction_bias"
    ]
    for layers, dense in ((61, 3), (20, 1), (1, 0)):
        kept = model.kept(layers=layers, embedding=True, head=True)
        assert sum(count for first, count in kept.layer_kinds() if first < dense) == dense
        assert kept.num_tensors == len(list(kept.parameters()))


def test_a_buffer_has_no_moments() -> None:
    """The correction bias is saved once, with the weights; the optimizer does not know it."""
    workload = replace(workloads.load("deepseek-v3"), model=_small("deepseek-v3"))
    workload = replace(workload, layout=replace(workload.layout, world_size=4))
    found = Counter(
        tensor.name for rank in range(4) for file in workload.files(rank) for tensor in file.tensors
    )
    assert found["model.layers.1.mlp.gate.e_score_correction_bias"] == 1
    assert not [n for n in found if "bias.exp_avg" in n or "bias.step" in n]
    assert found["optimizer.state.model.layers.1.mlp.gate.weight.exp_avg"] == 4


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-2-7b"])
@pytest.mark.parametrize("model_only", [False, True])
def test_sizes_need_no_list_of_tensors(name: str, model_only: bool) -> None:
    """The size that fsdp-dcp counts by shapes is that of its files, for every kind of rank."""
    model = workloads.load_model(name).kept(layers=4, embedding=True, head=True)
    plan = LAYOUTS["fsdp-dcp"](world_size=300, model_only=model_only)
    for rank, _ in plan.rank_classes(model):
        files = plan.files(model, rank)
        assert plan.size_bytes(model, rank) == sum(file.size_bytes for file in files)


@pytest.mark.parametrize("layout", ["megatron-legacy", "megatron-torch-dist"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_expert_parallel_ranks_divide_the_experts(layout: str, tensor_parallel: int) -> None:
    """All files together: each expert once per tensor rank, and three fp32 copies of everything."""
    model = workloads.load_model("megatron-mixtral-8x7b")
    arch = replace(model.arch, **_SMALL, num_kv_heads=4, expert_ffn_size=32)
    model = replace(model, arch=replace(arch, num_layers=2))
    plan = LAYOUTS[layout](
        tensor_parallel=tensor_parallel, pipeline_parallel=2, data_parallel=4, expert_parallel=2
    )
    prepared = plan.prepare(model)
    plan.check(prepared)
    weights: Counter[str] = Counter()
    optimizer_bytes = 0
    for rank in range(plan.ranks):
        for file in plan.files(prepared, rank):
            for tensor in file.tensors:
                if "experts" in tensor.name and "optimizer" not in tensor.name:
                    weights[tensor.name.removeprefix("model/")] += 1
                elif "optimizer" in tensor.name:
                    optimizer_bytes += tensor.size_bytes
    experts = [p for p in prepared.parameters() if p.expert is not None]
    stage = [p for p in experts if p.name.startswith("decoder.layers.0.")]
    # Both stages number their layers from 0, so that each name is there for both of them.
    assert weights == {p.name: 2 * tensor_parallel for p in stage}
    if layout == "megatron-torch-dist":
        assert optimizer_bytes == 3 * 4 * prepared.num_parameters


def test_expert_parallel_files_are_named_like_megatrons() -> None:
    """The expert rank follows the stage, and only the first rank of each expert rank writes."""
    model = workloads.load_model("megatron-mixtral-8x7b")
    plan = LAYOUTS["megatron-legacy"](pipeline_parallel=2, data_parallel=16, expert_parallel=8)
    prepared = plan.prepare(model)
    paths = [file.path for rank in range(32) for file in plan.files(prepared, rank)]
    wanted = [
        f"iter_0001000/mp_rank_00_{stage:03d}_{expert:03d}/model_optim_rng.pt"
        for stage in range(2)
        for expert in range(8)
    ]
    assert [path for path in paths if path.endswith(".pt")] == wanted


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("megatron-mixtral-8x7b", {"data_parallel": 12}, "must divide data_parallel, which is 12"),
        ("megatron-mixtral-8x7b", {"expert_parallel": 16}, "must divide num_experts"),
        ("megatron-1t", {}, "has none"),
    ],
)
def test_experts_that_cannot_be_divided(model: str, fields: dict[str, int], reason: str) -> None:
    plan = LAYOUTS["megatron-legacy"](**{"data_parallel": 16, "expert_parallel": 8} | fields)
    with pytest.raises(ValueError, match=reason):
        plan.check(workloads.load_model(model))
