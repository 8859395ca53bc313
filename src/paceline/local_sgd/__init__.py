"""Local SGD: DiLoCo, streaming DiLoCo and merges by quorum."""
