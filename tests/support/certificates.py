"""Certificates of servers that tests start."""

from __future__ import annotations

import subprocess
from pathlib import Path


def self_signed(folder: Path, name: str, key: str, certificate: str) -> None:
    """For a host of this name, in files of the folder. It is its own authority."""
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"]
    words += ["-addext", f"subjectAltName=DNS:{name}", "-keyout", key, "-out", certificate]
    subprocess.run(words, check=True, capture_output=True, cwd=folder)
