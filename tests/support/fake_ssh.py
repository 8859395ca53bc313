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


# It stays, and says of a host whose processes are killed what ssh says of a lost connection.
STAYING = """{name}) export SSH_CONNECTION="{address} 1 {address} 22"; {command} "$@"; code=$?
[ $code -lt 128 ] && exit $code ;;"""


def install_ssh(folder: Path, hosts: Mapping[str, Host], stays: bool = False) -> Path:
    """The folder of a program ``ssh`` that reaches these hosts by their names; where it `stays`, a host may be lost."""
    cases = []
    for name, host in hosts.items():
        command = " ".join(f"'{word}'" for word in host.command())
        cases.append((STAYING if stays else CASE).format(name=name, address=host.address, command=command))
    place = folder / "bin"
    place.mkdir()
    (place / "ssh").write_text(SSH.format(cases="\n".join(cases)))
    (place / "ssh").chmod(0o755)
    return place
