"""Layers sharded inside, with the user's own forward."""
