"""The replica of a model and the data-parallel step."""
