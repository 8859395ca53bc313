"""How a global batch becomes an update: one readable file per strategy."""
