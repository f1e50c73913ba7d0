"""LLaMA as DLIO counts it for MLPerf Storage: flat tensors, q, k and v as one.

The head dimension is `hidden_size // num_heads`, even with a remainder. The norms are never split.
Source: dlio_benchmark/checkpointing/base_checkpointing.py, get_num_parameters.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family

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
