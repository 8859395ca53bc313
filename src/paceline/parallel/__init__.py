"""How a model is spread over workers: data parallelism, ZeRO, tensor, pipeline and sequence parallelism."""
