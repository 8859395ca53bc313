"""Both ends of a connection that begins with a handshake send small parts of messages at once."""

from __future__ import annotations

import socket
import threading

from paceline.base.handshake import NONCE, greet, introduce, receive_exactly


def test_both_ends_send_small_parts_at_once() -> None:
    """Else each part would wait until the one before is acknowledged, by up to 40 ms: a request has three parts."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as caller:
        accepted, _ = listener.accept()
        greeting = threading.Thread(target=greet, args=(accepted, b"key"))
        with accepted:
            greeting.start()
            assert introduce(caller, b"key", bytes(receive_exactly(caller, NONCE)))
            greeting.join()
            for end in (caller, accepted):
                assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
