"""Mixture of experts as Megatron-Core's GPTModel names and orders its tensors.

RMS norms, gated networks (linear_fc1 has both halves), no biases, an untied output layer, and the
experts as separate modules (`SequentialMLP`).
Source: Megatron-LM megatron/core/models/gpt and megatron/core/transformer/moe/experts.py.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family

MEGATRON_MOE = Family(
    id="megatron-moe",
    embedding=(("embedding.word_embeddings.weight", ("V", "H"), 0),),
    layer=(
        ("decoder.layers.{i}.input_layernorm.weight", ("H",), None),
        ("decoder.layers.{i}.self_attention.linear_proj.weight", ("H", "NH*HD"), 1),
        ("decoder.layers.{i}.self_attention.linear_qkv.weight", ("QKV", "H"), 0),
        ("decoder.layers.{i}.pre_mlp_layernorm.weight", ("H",), None),
        ("decoder.layers.{i}.mlp.router.weight", ("E", "H"), None),
        ("decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc1.weight", ("2*FE", "H"), 0),
        ("decoder.layers.{i}.mlp.experts.local_experts.{e}.linear_fc2.weight", ("H", "FE"), 1),
    ),
    head=(
        ("decoder.final_layernorm.weight", ("H",), None),
        ("output_layer.weight", ("V", "H"), 0),
    ),
    vocab_multiple=128,
)
