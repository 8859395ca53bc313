"""Reads weights and optimizer states that other programs have written. Nothing of them is executed."""
