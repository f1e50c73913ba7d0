"""BLOOM as transformers' BloomForCausalLM names and orders its tensors.

ALiBi needs no learned positions; the output layer is tied to the token embedding.
Source: transformers modeling_bloom.py; arXiv 2211.05100.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family

BLOOM = Family(
    id="bloom",
    embedding=(
        ("transformer.word_embeddings.weight", ("V", "H"), 0),
        ("transformer.word_embeddings_layernorm.weight", ("H",), None),
        ("transformer.word_embeddings_layernorm.bias", ("H",), None),
    ),
    layer=(
        ("transformer.h.{i}.input_layernorm.weight", ("H",), None),
        ("transformer.h.{i}.input_layernorm.bias", ("H",), None),
        ("transformer.h.{i}.self_attention.query_key_value.weight", ("3*H", "H"), 0),
        ("transformer.h.{i}.self_attention.query_key_value.bias", ("3*H",), 0),
        ("transformer.h.{i}.self_attention.dense.weight", ("H", "H"), 1),
        ("transformer.h.{i}.self_attention.dense.bias", ("H",), None),
        ("transformer.h.{i}.post_attention_layernorm.weight", ("H",), None),
        ("transformer.h.{i}.post_attention_layernorm.bias", ("H",), None),
        ("transformer.h.{i}.mlp.dense_h_to_4h.weight", ("F", "H"), 0),
        ("transformer.h.{i}.mlp.dense_h_to_4h.bias", ("F",), 0),
        ("transformer.h.{i}.mlp.dense_4h_to_h.weight", ("H", "F"), 1),
        ("transformer.h.{i}.mlp.dense_4h_to_h.bias", ("H",), None),
    ),
    head=(
        ("transformer.ln_f.weight", ("H",), None),
        ("transformer.ln_f.bias", ("H",), None),
    ),
)
