"""Which samples, in which order, by whom: sample order, grid, loader."""
