"""A program named ssh that needs no sshd: it enters a network namespace, and forwards sockets that are files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from networks import Host

SSH = """#!/bin/sh
while [ "$1" != -- ]; do
    case "$1" in -R | -L) ln -sf "${{2#*:}}" "${{2%%:*}}"; shift ;; esac
    shift
done
name="$2"
shift 2
case "$name" in
{cases}
esac
exit 255
"""
CASE = """{name}) export SSH_CONNECTION="{address} 1 {address} 22"; exec {command} "$@" ;;"""


def install_ssh(folder: Path, hosts: Mapping[str, Host]) -> Path:
    """The folder of a program ``ssh`` that reaches these hosts by their names."""
    cases = []
    for name, host in hosts.items():
        command = " ".join(f"'{word}'" for word in host.command())
        cases.append(CASE.format(name=name, address=host.address, command=command))
    place = folder / "bin"
    place.mkdir()
    (place / "ssh").write_text(SSH.format(cases="\n".join(cases)))
    (place / "ssh").chmod(0o755)
    return place
