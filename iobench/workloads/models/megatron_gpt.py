"""GPT as Megatron-Core's GPTModel names and orders its tensors.

The vocabulary is padded to a multiple of 128 per tensor parallel rank. The output layer is tied to
the word embedding, and the last pipeline stage has a copy of it.
Source: Megatron-LM megatron/core/models/gpt; arXiv 2104.04473.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family

MEGATRON_GPT = Family(
    id="megatron-gpt",
    embedding=(
        ("embedding.word_embeddings.weight", ("V", "H"), 0),
        ("embedding.position_embeddings.weight", ("P", "H"), None),
    ),
    layer=(
        ("decoder.layers.{i}.input_layernorm.weight", ("H",), None),
        ("decoder.layers.{i}.input_layernorm.bias", ("H",), None),
        ("decoder.layers.{i}.self_attention.linear_qkv.weight", ("3*H", "H"), 0),
        ("decoder.layers.{i}.self_attention.linear_qkv.bias", ("3*H",), 0),
        ("decoder.layers.{i}.self_attention.linear_proj.weight", ("H", "H"), 1),
        ("decoder.layers.{i}.self_attention.linear_proj.bias", ("H",), None),
        ("decoder.layers.{i}.pre_mlp_layernorm.weight", ("H",), None),
        ("decoder.layers.{i}.pre_mlp_layernorm.bias", ("H",), None),
        ("decoder.layers.{i}.mlp.linear_fc1.weight", ("F", "H"), 0),
        ("decoder.layers.{i}.mlp.linear_fc1.bias", ("F",), 0),
        ("decoder.layers.{i}.mlp.linear_fc2.weight", ("H", "F"), 1),
        ("decoder.layers.{i}.mlp.linear_fc2.bias", ("H",), None),
    ),
    head=(
        ("decoder.final_layernorm.weight", ("H",), None),
        ("decoder.final_layernorm.bias", ("H",), None),
    ),
    vocab_multiple=128,
)
