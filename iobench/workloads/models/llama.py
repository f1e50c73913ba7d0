"""LLaMA 1 to 3 as transformers' LlamaForCausalLM names and orders their tensors.

Source: transformers modeling_llama.py; arXiv 2302.13971, 2307.09288, 2407.21783.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family

LLAMA = Family(
    id="llama",
    embedding=(("model.embed_tokens.weight", ("V", "H"), 0),),
    layer=(
        ("model.layers.{i}.self_attn.q_proj.weight", ("NH*HD", "H"), 0),
        ("model.layers.{i}.self_attn.k_proj.weight", ("NKV*HD", "H"), 0),
        ("model.layers.{i}.self_attn.v_proj.weight", ("NKV*HD", "H"), 0),
        ("model.layers.{i}.self_attn.o_proj.weight", ("H", "NH*HD"), 1),
        ("model.layers.{i}.mlp.gate_proj.weight", ("F", "H"), 0),
        ("model.layers.{i}.mlp.up_proj.weight", ("F", "H"), 0),
        ("model.layers.{i}.mlp.down_proj.weight", ("H", "F"), 1),
        ("model.layers.{i}.input_layernorm.weight", ("H",), None),
        ("model.layers.{i}.post_attention_layernorm.weight", ("H",), None),
    ),
    head=(
        ("model.norm.weight", ("H",), None),
        ("lm_head.weight", ("V", "H"), 0),
    ),
)
