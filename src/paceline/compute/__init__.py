"""One worker's arithmetic: micro-batches, forward and backward, random generators, buffers, the optimizer's update."""
