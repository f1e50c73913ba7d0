"""Programs that load models and know nothing of iobench: Transformers, and a loop like vLLM's."""

import os
import sys

import torch
from safetensors import safe_open


def weights(directory):
    """As vLLM's loader goes over the files of a model."""
    import glob

    for file in sorted(glob.glob(f"{directory}/*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- not a mapping
                yield name, opened.get_tensor(name)


def columns(directory, rank, ranks):
    """As a loader that cuts tensors itself."""
    with safe_open(f"{directory}/model.safetensors", framework="pt", device="cpu") as opened:
        part = opened.get_slice("model.layers.0.mlp.down_proj.weight")
        rows, width = part.get_shape()
        step = width // ranks
        cut = part[:, rank * step : (rank + 1) * step]
        assert part.get_dtype() == "F32"
        assert cut.shape == (rows, step)
        return cut


def model(directory, **how):
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_pretrained(directory, **how)
    with torch.no_grad():
        return made(torch.arange(16).view(1, 16)).logits.double().sum().item()


def sums(directory):
    return {name: tensor.double().sum().item() for name, tensor in weights(directory)}


if __name__ == "__main__":
    directory = sys.argv[1]
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        # One call: the ranks share the output, and print writes each argument alone.
        sys.stdout.write(f"logits {model(directory, tp_plan='auto')}\n")
        torch.distributed.destroy_process_group()
    else:
        print(model(directory, device_map="cpu"), sums(directory), columns(directory, 1, 2).sum())
