"""Mixture-of-experts models as transformers names and orders their tensors.

Sources: transformers modeling_mixtral.py, modeling_qwen3_moe.py and modeling_deepseek_v3.py, with
the names of the published files; arXiv 2401.04088, 2505.09388 and 2412.19437.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family, Row

__all__ = ["DEEPSEEK_V3", "MIXTRAL", "QWEN3_MOE"]

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


def _gated(prefix: str, width: str) -> tuple[Row, ...]:
    """Return the rows of one gated network."""
    return (
        (f"model.layers.{{i}}.{prefix}.gate_proj.weight", (width, "H"), 0),
        (f"model.layers.{{i}}.{prefix}.up_proj.weight", (width, "H"), 0),
        (f"model.layers.{{i}}.{prefix}.down_proj.weight", ("H", width), 1),
    )


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
