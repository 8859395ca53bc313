"""How tensors travel: the group, named collectives, gradient buckets."""
