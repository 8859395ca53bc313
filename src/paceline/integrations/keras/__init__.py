"""`paceline.keras`: trains what a compiled Keras model describes."""
