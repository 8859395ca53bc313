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
    """With a limit to the connections over which nobody has shown a key yet: the oldest one gives way to one too many.
    So neither they nor others keep out whoever has one. `routes` are those of an application; all limits are tornado's.
    """

    def initialize(self, routes: list[Any], **limits: Any) -> None:  # type: ignore[override]
        self._strangers = NewConnections[IOStream](OF_ONE, IN_ALL)
        app = Application(routes, log_function=lambda _: None, strangers=self._strangers)
        super().initialize(app, **limits)

    def handle_stream(self, stream: IOStream, address: tuple[str, int]) -> None:
        if (oldest := self._strangers.come(stream, address[0], time.monotonic())) is not None:
            oldest.close()
        super().handle_stream(stream, address)

    def on_close(self, server_conn: Any) -> None:
        self._strangers.go(server_conn.stream)
        super().on_close(server_conn)


def know(handler: RequestHandler) -> None:
    """Whoever sent this request has shown a key."""
    connection: Any = handler.request.connection
    handler.settings["strangers"].go(connection.stream)
