"""Two network namespaces far from each other. Usage: far.py SPACE SPACE SECONDS, as root.

Each gets a device eth0, through which what it sends comes to the other one after so many seconds. Prints a line when
both are there, and forwards until it is killed.
"""

import ctypes
import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET, MTU = 0x400454CA, 0x0001, 0x1000, 0x40000000, 9000
MOST = 4096  # packets under way in one direction; the rest is lost, as in a router


def device(space: str) -> int:
    """A device eth0 in that namespace."""
    with open(f"/run/netns/{space}") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(made, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TUN | IFF_NO_PI))
    return made


def main() -> None:
    *spaces, seconds = sys.argv[1:]
    ends = [device(space) for space in spaces]
    print("ready", flush=True)
    under_way: list[deque[tuple[float, bytes]]] = [deque(), deque()]
    with selectors.DefaultSelector() as selector:
        for number, end in enumerate(ends):
            selector.register(end, selectors.EVENT_READ, number)
        while True:
            due = min((packets[0][0] for packets in under_way if packets), default=float("inf"))
            wait = max(0.0, due - time.monotonic()) if due < float("inf") else None
            for key, _ in selector.select(wait):
                packets = under_way[1 - key.data]
                for _ in range(64):
                    try:
                        packet = os.read(key.fd, MTU)
                    except BlockingIOError:
                        break
                    if len(packets) < MOST:
                        packets.append((time.monotonic() + float(seconds), packet))
            now = time.monotonic()
            for end, packets in zip(ends, under_way, strict=True):
                while packets and packets[0][0] <= now:
                    try:
                        os.write(end, packets[0][1])
                    except BlockingIOError:
                        break
                    except OSError:  # that end is not up yet, or not any more
                        pass
                    packets.popleft()


if __name__ == "__main__":
    main()
