"""Token folders written by hand, and a web server that serves them and counts what it served."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np


def write_folder(folder: Path, shards: Sequence[np.ndarray], vocabulary: int = 60_000) -> np.ndarray:
    """Shards of one dtype as `paceline tokenize` would leave them; all their tokens in a row."""
    folder.mkdir(parents=True, exist_ok=True)
    told = []
    for number, shard in enumerate(shards):
        data = shard.astype(shard.dtype.newbyteorder("<")).tobytes()
        (folder / f"{number:05}.bin").write_bytes(data)
        size = {"tokens": len(shard), "bytes": len(data)}
        told.append({"file": f"{number:05}.bin", **size, "sha256": hashlib.sha256(data).hexdigest()})
    about = {"format": 1, "dtype": shards[0].dtype.name, "vocabulary": vocabulary, "end": 0, "tokenizer": {}}
    (folder / "tokens.json").write_text(json.dumps({**about, "shards": told}))
    return np.concatenate(shards)


class Ranged(SimpleHTTPRequestHandler):
    """Knows ranges of bytes, which the standard library's does not. `served` are the (path, bytes) of each GET."""

    protocol_version = "HTTP/1.1"
    served: list[tuple[str, int]]

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, path.stat().st_size)
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(stop - start)
        self.served.append((self.path, len(data)))  # before the answer, after which the test looks
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


class Unranged(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@contextmanager
def served(folder: Path, handler: type[SimpleHTTPRequestHandler] = Ranged) -> Iterator[tuple[str, list]]:
    """The URL of `folder`, and what was served from it so far."""
    log: list[tuple[str, int]] = []
    kind = type("Handler", (handler,), {"served": log})
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(kind, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
