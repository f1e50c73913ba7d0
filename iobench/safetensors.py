"""safetensors' save_file and load_file over a writer: drop-ins with the stock signatures and files.

    import iobench.safetensors

    iobench.safetensors.save_file(tensors, "model.safetensors", metadata={"format": "pt"})
    tensors = iobench.safetensors.load_file("model.safetensors")

Without `writer` the process's default is used, see `iobench.set_default_writer`.
"""

from iobench.integrations.safetensors_functions import load_file, save_file

__all__ = ["load_file", "save_file"]
