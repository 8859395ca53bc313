"""Where workers run: this machine."""
