"""An HTTP server with limits on unknown connections."""

from __future__ import annotations

import logging
import time
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import IOStream
from tornado.web import Application, RequestHandler

from paceline.base.handshake import NewConnections

OF_ONE, IN_ALL = 100, 1000  # connections of strangers, from one address and in all


logging.getLogger("tornado.general").setLevel(logging.ERROR)  # else strangers could write to the terminal


class LimitedServer(HTTPServer):
    """An HTTP server that limits the number of connections over which no key has been shown yet.

    One connection too many closes the oldest of them, so that strangers cannot keep out a client that has the key.
    `routes` are those of an application, `limits` are tornado's.
    """

    def initialize(self, routes: list[Any], **limits: Any) -> None:  # type: ignore[override]
        """Makes the application of the routes; tornado calls this instead of a constructor."""
        self._strangers = NewConnections[IOStream](OF_ONE, IN_ALL)
        app = Application(routes, log_function=lambda _: None, strangers=self._strangers)
        super().initialize(app, **limits)

    def handle_stream(self, stream: IOStream, address: tuple[str, int]) -> None:
        """Serves a new connection, and closes the oldest unknown one if there are too many."""
        if (oldest := self._strangers.come(stream, address[0], time.monotonic())) is not None:
            oldest.close()
        super().handle_stream(stream, address)

    def on_close(self, server_conn: Any) -> None:
        """Forgets a connection that has been closed."""
        self._strangers.go(server_conn.stream)
        super().on_close(server_conn)


def know(handler: RequestHandler) -> None:
    """Marks the connection of a request as known, once the request has shown a key."""
    connection: Any = handler.request.connection
    handler.settings["strangers"].go(connection.stream)
