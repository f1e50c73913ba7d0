"""State dict <-> file images: safetensors, torch zip, raw."""
