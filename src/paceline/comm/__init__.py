"""How tensors travel: transports, collectives, gradient buckets and compression."""
