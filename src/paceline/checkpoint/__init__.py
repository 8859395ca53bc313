"""What survives a run: safetensors files and a JSON manifest, written atomically and verified."""
