"""Drop-in replacements of safetensors' functions that use a writer; stock files.

    import iobench.safetensors

    iobench.safetensors.save_file(tensors, "model.safetensors", metadata={"format": "pt"})
    tensors = iobench.safetensors.load_file("model.safetensors")
    with iobench.safetensors.safe_open("model.safetensors", framework="pt") as file:
        rows = file.get_slice("model.embed_tokens.weight")[:1000]

`load_sharded` reads what each rank of a job needs of a whole model.

Calls without `writer` use the default of the process: `iobench.set_default_writer`.
"""

from iobench.integrations.safetensors_dropins import (
    load_file,
    load_sharded,
    safe_open,
    save_file,
)

__all__ = ["load_file", "load_sharded", "safe_open", "save_file"]
