"""Runs a script, and counts the bytes that this worker and parameter servers tell each other of gradients and weights:
weighed.py SCRIPT [ARGUMENT...]
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from paceline.param_server.client import ServerClient
from paceline.param_server.protocol import Kind, Message

TOLD = Counter[str]()


def weigh() -> None:
    put, hear = ServerClient.put, ServerClient._hear

    def putting(servers: ServerClient, server: int, kind: int, trainer: int, key: Any, *content: Any) -> None:
        put(servers, server, kind, trainer, key, *content)
        numbers, what = content or ((), b"")
        TOLD["pushed"] += sum(tensor.nbytes for tensor in what) if numbers else len(what)

    def hearing(servers: ServerClient, server: int, frame: Message) -> None:
        TOLD["taken"] += len(frame.text) if frame.kind != Kind.KEPT else 0  # for a checkpoint
        TOLD["taken"] += sum(servers.landings[frame.trainer][number].nbytes for number in frame.numbers)
        hear(servers, server, frame)

    ServerClient.put, ServerClient._hear = putting, hearing  # type: ignore[method-assign]


if __name__ == "__main__":
    weigh()
    del sys.argv[0]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        Path(f"told-{os.environ['PACELINE_RANK']}").write_text(json.dumps(TOLD))
