"""Drop-in replacements of safetensors' save_file and load_file that use a writer; stock files.

    import iobench.safetensors

    iobench.safetensors.save_file(tensors, "model.safetensors", metadata={"format": "pt"})
    tensors = iobench.safetensors.load_file("model.safetensors")

Calls without `writer` use the default of the process: `iobench.set_default_writer`.
"""

from iobench.integrations.safetensors_dropins import load_file, save_file

__all__ = ["load_file", "save_file"]
