"""What survives: safetensors and a JSON manifest, atomic and verified; export."""
