"""Horovod's PyTorch API over Paceline's transport."""
