"""`paceline.hf`: trains what a `transformers.Trainer` describes."""
