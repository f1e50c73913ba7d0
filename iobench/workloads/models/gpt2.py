"""GPT-2 and GPT-3 as transformers' GPT2LMHeadModel names and orders their tensors.

Its Conv1D keeps weights as (in, out); the output layer is tied to the token embedding.
Source: transformers modeling_gpt2.py.
"""

from __future__ import annotations

from iobench.workloads.models.model import Family

GPT2 = Family(
    id="gpt2",
    embedding=(
        ("transformer.wte.weight", ("V", "H"), 0),
        ("transformer.wpe.weight", ("P", "H"), None),
    ),
    layer=(
        ("transformer.h.{i}.ln_1.weight", ("H",), None),
        ("transformer.h.{i}.ln_1.bias", ("H",), None),
        ("transformer.h.{i}.attn.c_attn.weight", ("H", "3*H"), 1),
        ("transformer.h.{i}.attn.c_attn.bias", ("3*H",), 0),
        ("transformer.h.{i}.attn.c_proj.weight", ("H", "H"), 0),
        ("transformer.h.{i}.attn.c_proj.bias", ("H",), None),
        ("transformer.h.{i}.ln_2.weight", ("H",), None),
        ("transformer.h.{i}.ln_2.bias", ("H",), None),
        ("transformer.h.{i}.mlp.c_fc.weight", ("H", "F"), 1),
        ("transformer.h.{i}.mlp.c_fc.bias", ("F",), 0),
        ("transformer.h.{i}.mlp.c_proj.weight", ("F", "H"), 0),
        ("transformer.h.{i}.mlp.c_proj.bias", ("H",), None),
    ),
    head=(
        ("transformer.ln_f.weight", ("H",), None),
        ("transformer.ln_f.bias", ("H",), None),
    ),
)
