"""The weights of a model by the default loader of vLLM: their digests, as one line of JSON."""

import hashlib
import json
import sys

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

if __name__ == "__main__":
    loader = DefaultModelLoader(LoadConfig(load_format="safetensors"))
    source = DefaultModelLoader.Source(sys.argv[1], revision=None)
    found = {
        name: [
            str(tensor.dtype),
            list(tensor.shape),
            hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest(),
        ]
        for name, tensor in loader._get_weights_iterator(source)
    }
    sys.stdout.write(f"\nweights {json.dumps(found)}\n")
