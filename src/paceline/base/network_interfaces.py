"""Lists the network interfaces of this host with their addresses."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

_SIOCGIFADDR = 0x8915  # the request for the address of an interface; see netdevice(7)


def interface_addresses() -> Iterator[tuple[str, str]]:
    """The names and the IPv4 addresses of the interfaces that have one, in the order of the interfaces."""
    import fcntl  # not on every system on which a world of one trains

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            yield name, socket.inet_ntoa(answer[20:24])
