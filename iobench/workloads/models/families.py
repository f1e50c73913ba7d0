"""Families of models: how a framework names, orders and splits the tensors of a model.

Sources: transformers modeling_llama.py, modeling_gpt2.py, modeling_bloom.py, modeling_mixtral.py,
modeling_qwen3_moe.py and modeling_deepseek_v3.py, with the names of the published files;
Megatron-LM megatron/core/models/gpt; arXiv 2302.13971, 2307.09288, 2407.21783, 2211.05100,
2104.04473, 2401.04088, 2505.09388 and 2412.19437.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family, Row

_EMBEDDING: tuple[Row, ...] = (("model.embed_tokens.weight", ("V", "H"), 0),)
_HEAD: tuple[Row, ...] = (
    ("model.norm.weight", ("H",), None),
    ("lm_head.weight", ("V", "H"), 0),
)
_GROUPED_QUERY: tuple[Row, ...] = (
    ("model.layers.{i}.self_attn.q_proj.weight", ("NH*HD", "H"), 0),
    ("model.layers.{i}.self_attn.k_proj.weight", ("NKV*HD", "H"), 0),
    ("model.layers.{i}.self_attn.v_proj.weight", ("NKV*HD", "H"), 0),
    ("model.layers.{i}.self_attn.o_proj.weight", ("H", "NH*HD"), 1),
)
_LATENT: tuple[Row, ...] = (
    ("model.layers.{i}.self_attn.q_a_proj.weight", ("QR", "H"), None),
    ("model.layers.{i}.self_attn.q_a_layernorm.weight", ("QR",), None),
    ("model.layers.{i}.self_attn.q_b_proj.weight", ("NH*QD", "QR"), 0),
    ("model.layers.{i}.self_attn.kv_a_proj_with_mqa.weight", ("KVA", "H"), None),
    ("model.layers.{i}.self_attn.kv_a_layernorm.weight", ("KR",), None),
    ("model.layers.{i}.self_attn.kv_b_proj.weight", ("NH*KVB", "KR"), 0),
    ("model.layers.{i}.self_attn.o_proj.weight", ("H", "NH*VD"), 1),
)
_NORMS: tuple[Row, ...] = (
    ("model.layers.{i}.input_layernorm.weight", ("H",), None),
    ("model.layers.{i}.post_attention_layernorm.weight", ("H",), None),
)


def _biased(
    name: str, shape: tuple[str, ...], split: int | None = None, *, outputs: int = 0
) -> tuple[Row, Row]:
    """Return the rows of a weight and of its bias, which is as long as the weight's `outputs`.

    The bias is split where its weight is split by outputs.
    """
    weight = (f"{name}.weight", shape, split)
    return weight, (f"{name}.bias", (shape[outputs],), 0 if split == outputs else None)


def _gated(prefix: str, width: str) -> tuple[Row, ...]:
    return (
        (f"model.layers.{{i}}.{prefix}.gate_proj.weight", (width, "H"), 0),
        (f"model.layers.{{i}}.{prefix}.up_proj.weight", (width, "H"), 0),
        (f"model.layers.{{i}}.{prefix}.down_proj.weight", ("H", width), 1),
    )


LLAMA = Family(
    id="llama",
    embedding=_EMBEDDING,
    layer=(*_GROUPED_QUERY, *_gated("mlp", "F"), *_NORMS),
    head=_HEAD,
)
"""LLaMA 1 to 3 as transformers' LlamaForCausalLM names and orders their tensors.

Source: transformers modeling_llama.py; arXiv 2302.13971, 2307.09288, 2407.21783.
"""

GPT2 = Family(
    id="gpt2",
    embedding=(
        ("transformer.wte.weight", ("V", "H"), 0),
        ("transformer.wpe.weight", ("P", "H"), None),
    ),
    layer=(
        *_biased("transformer.h.{i}.ln_1", ("H",)),
        *_biased("transformer.h.{i}.attn.c_attn", ("H", "3*H"), 1, outputs=1),
        *_biased("transformer.h.{i}.attn.c_proj", ("H", "H"), 0, outputs=1),
        *_biased("transformer.h.{i}.ln_2", ("H",)),
        *_biased("transformer.h.{i}.mlp.c_fc", ("H", "F"), 1, outputs=1),
        *_biased("transformer.h.{i}.mlp.c_proj", ("F", "H"), 0, outputs=1),
    ),
    head=(*_biased("transformer.ln_f", ("H",)),),
)
"""GPT-2 and GPT-3 as transformers' GPT2LMHeadModel names and orders their tensors.

Its Conv1D keeps weights as (in, out); the output layer is tied to the token embedding.
Source: transformers modeling_gpt2.py.
"""

BLOOM = Family(
    id="bloom",
    embedding=(
        ("transformer.word_embeddings.weight", ("V", "H"), 0),
        *_biased("transformer.word_embeddings_layernorm", ("H",)),
    ),
    layer=(
        *_biased("transformer.h.{i}.input_layernorm", ("H",)),
        *_biased("transformer.h.{i}.self_attention.query_key_value", ("3*H", "H"), 0),
        *_biased("transformer.h.{i}.self_attention.dense", ("H", "H"), 1),
        *_biased("transformer.h.{i}.post_attention_layernorm", ("H",)),
        *_biased("transformer.h.{i}.mlp.dense_h_to_4h", ("F", "H"), 0),
        *_biased("transformer.h.{i}.mlp.dense_4h_to_h", ("H", "F"), 1),
    ),
    head=(*_biased("transformer.ln_f", ("H",)),),
)
"""BLOOM as transformers' BloomForCausalLM names and orders its tensors.

ALiBi needs no learned positions; the output layer is tied to the token embedding.
Source: transformers modeling_bloom.py; arXiv 2211.05100.
"""

MEGATRON_GPT = Family(
    id="megatron-gpt",
    embedding=(
        ("embedding.word_embeddings.weight", ("V", "H"), 0),
        ("embedding.position_embeddings.weight", ("P", "H"), None),
    ),
    layer=(
        *_biased("decoder.layers.{i}.input_layernorm", ("H",)),
        *_biased("decoder.layers.{i}.self_attention.linear_qkv", ("3*H", "H"), 0),
        *_biased("decoder.layers.{i}.self_attention.linear_proj", ("H", "H"), 1),
        *_biased("decoder.layers.{i}.pre_mlp_layernorm", ("H",)),
        *_biased("decoder.layers.{i}.mlp.linear_fc1", ("F", "H"), 0),
        *_biased("decoder.layers.{i}.mlp.linear_fc2", ("H", "F"), 1),
    ),
    head=(*_biased("decoder.final_layernorm", ("H",)),),
    vocab_multiple=128,
)
"""GPT as Megatron-Core's GPTModel names and orders its tensors.

The vocabulary is padded to a multiple of 128 per tensor parallel rank. The output layer is tied to
the word embedding, and the last pipeline stage has a copy of it.
Source: Megatron-LM megatron/core/models/gpt; arXiv 2104.04473.
"""

DLIO_LLAMA = Family(
    id="dlio-llama",
    whole_heads=False,
    embedding=(("embedding", ("H*V",), 0),),
    layer=(
        ("layers.{i}.input_norm", ("H",), None),
        ("layers.{i}.qkv", ("H*QKV",), 0),
        ("layers.{i}.dense", ("H*H",), 0),
        ("layers.{i}.layer_norm", ("H",), None),
        ("layers.{i}.mlp_h_to_4h", ("2*F*H",), 0),
        ("layers.{i}.mlp_4h_to_h", ("F*H",), 0),
    ),
    head=(
        ("lm_head", ("H*V",), 0),
        ("weight", ("H",), None),
    ),
)
"""LLaMA as DLIO counts it for MLPerf Storage: flat tensors, q, k and v as one.

The head dimension is `hidden_size // num_heads`, even with a remainder. The norms are never split.
Source: dlio_benchmark/checkpointing/base_checkpointing.py, get_num_parameters.
"""

MIXTRAL = Family(
    id="mixtral",
    embedding=_EMBEDDING,
    layer=(
        *_GROUPED_QUERY,
        ("model.layers.{i}.block_sparse_moe.gate.weight", ("E", "H"), None),
        ("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", ("FE", "H"), 0),
        ("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", ("H", "FE"), 1),
        ("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", ("FE", "H"), 0),
        *_NORMS,
    ),
    head=_HEAD,
)
QWEN3_MOE = Family(
    id="qwen3-moe",
    embedding=_EMBEDDING,
    layer=(
        *_GROUPED_QUERY,
        ("model.layers.{i}.self_attn.q_norm.weight", ("HD",), None),
        ("model.layers.{i}.self_attn.k_norm.weight", ("HD",), None),
        ("model.layers.{i}.mlp.gate.weight", ("E", "H"), None),
        *_gated("mlp.experts.{e}", "FE"),
        *_NORMS,
    ),
    head=_HEAD,
    whole_heads=False,
)
DEEPSEEK_V3 = Family(
    id="deepseek-v3",
    embedding=_EMBEDDING,
    dense_layer=(*_LATENT, *_gated("mlp", "F"), *_NORMS),
    layer=(
        *_LATENT,
        ("model.layers.{i}.mlp.gate.weight", ("E", "H"), None),
        ("model.layers.{i}.mlp.gate.e_score_correction_bias", ("E",), None),
        *_gated("mlp.experts.{e}", "FE"),
        *_gated("mlp.shared_experts", "FS"),
        *_NORMS,
    ),
    head=_HEAD,
    whole_heads=False,
    buffers=("e_score_correction_bias",),
)

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
"""Mixture of experts as Megatron-Core's GPTModel names and orders its tensors.

RMS norms, gated networks (linear_fc1 has both halves), no biases, an untied output layer, and the
experts as separate modules (`SequentialMLP`).
Source: Megatron-LM megatron/core/models/gpt and megatron/core/transformer/moe/experts.py.
"""

FAMILIES = {
    family.id: family
    for family in (
        *(LLAMA, GPT2, BLOOM, MEGATRON_GPT, DLIO_LLAMA),
        *(MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, MEGATRON_MOE),
    )
}
"""Every family of tensor templates, by id."""
