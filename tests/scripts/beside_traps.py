"""Beside traps.py, for it to import."""


def fail() -> None:
    raise ValueError("beside the script")
