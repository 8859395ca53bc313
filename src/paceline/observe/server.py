"""The process behind /metrics and the live page: its listening sockets and routes.

It serves, as far as the options of the run ask for them:

- GET /metrics for Prometheus, with the run's reading key as bearer token,
- the live page at another address, see `paceline.observe.live`,
- reports to Kubeflow Trainer, see `paceline.observe.trainjob`.

The process only reads the journal, so killing or flooding it does not affect the run. After the run's end (its standard
input is closed), metrics are served until they were scraped once, but at most for 15 seconds; the page is served for
15 seconds. Its output is printed on the run's console.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.base.http_server import LimitedServer
from paceline.team.reading_key import reading_key, write_targets

LINGER = 15.0  # seconds for which requests are answered after the end of the run
NICE = 10  # so that the training has priority


async def serve(given: Mapping[str, Any]) -> None:
    """Answers requests until the run has ended and the last figures were scraped; then ends the process.

    `given` has the `folder` and the name (`run`) of the run; the file descriptors of listening sockets for `metrics`
    and for the `page`, which answers for the names in `hosts`; the Prometheus `targets`, which are removed at the end
    from the folders in `told`; and the `trainjob` server to report to.
    """
    folder, loop = Path(given["folder"]), asyncio.get_running_loop()
    ended, scraped = asyncio.Event(), asyncio.Event()
    key = reading_key(folder)
    if given.get("metrics") is not None:
        from paceline.observe.prometheus import Figures, ScrapeHandler  # needs the client of Prometheus

        about = {"figures": Figures(folder, given["run"]), "key": key, "ended": ended, "scraped": scraped}
        _answer(given["metrics"], [("/metrics", ScrapeHandler, about)])
    views = None
    if given.get("page") is not None:
        from paceline.observe.live import Views, routes

        views = Views(folder, key, given["hosts"])
        _answer(given["page"], routes(views))
    telling = []
    if given.get("trainjob") is not None:
        from paceline.observe.trainjob import report

        telling = [asyncio.create_task(report(folder, given["trainjob"], ended))]
    over = loop.create_future()
    loop.add_reader(0, lambda: None if os.read(0, 1 << 10) or over.done() else over.set_result(None))
    await over
    loop.remove_reader(0)
    ended.set()
    if views is not None:
        views.ended = True
    await asyncio.gather(*telling)
    os.close(1)  # nothing more will be printed
    if given.get("page") is not None:
        await asyncio.sleep(LINGER)
    elif given.get("metrics") is not None:
        with suppress(TimeoutError):
            await asyncio.wait_for(scraped.wait(), LINGER)
            await asyncio.sleep(0.2)  # so that the answer can be sent
    for targets_folder in given["announced"]:
        with suppress(OSError):
            write_targets(Path(targets_folder), [], instead_of=given["targets"])
    os._exit(0)  # without waiting for readers that do not read


def _answer(listener: int, routes: list[Any]) -> None:
    os.set_inheritable(listener, False)
    server = LimitedServer(
        routes,
        max_body_size=1 << 10,
        max_header_size=1 << 14,
        max_buffer_size=1 << 15,
        idle_connection_timeout=60.0,
        body_timeout=5.0,
    )
    listening = socket.socket(fileno=listener)
    listening.setblocking(False)
    server.add_socket(listening)


if __name__ == "__main__":
    os.nice(NICE)
    asyncio.run(serve(json.loads(sys.argv[1])))
