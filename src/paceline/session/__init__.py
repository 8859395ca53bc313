"""One process of a run: its folder, its checkpoints, and checks that all workers agree."""
