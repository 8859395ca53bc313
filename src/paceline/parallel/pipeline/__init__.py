"""A model in stages, with the user's own forward."""
