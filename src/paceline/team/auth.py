"""The run's token, and the signatures of requests to the coordinator and of its answers.

The token is never sent: requests and answers are signed with it. No torch.
"""

from __future__ import annotations

import hmac
import os
import secrets
from functools import cache
from pathlib import Path

from paceline.base.console import in_one_line, quoted
from paceline.base.handshake import make_key
from paceline.base.journal import replace_file
from paceline.base.schema import open_file
from paceline.errors import UsageError

NAME = "token"
SCHEME = "Paceline"
ANSWER = "Paceline-Signature"  # the header of an answer that holds its signature


def make_token(folder: Path) -> bytes:
    """The token of a run folder, made if there is none: 32 random bytes as hexadecimal digits."""
    path = folder / NAME
    if not path.exists():
        keep_token(folder, secrets.token_hex(32).encode())
    return read_token(path)


def keep_token(folder: Path, token: bytes) -> None:
    """Writes a token into a run folder, mode 0600."""
    replace_file(folder / NAME, token.decode() + "\n")


def read_token(path: Path) -> bytes:
    """Reads the token in a file. UsageError: the file cannot be read, has no token, or can be read by other users.

    If the file belongs to root and this process does not, its group may read it: Kubernetes passes a Secret to a
    container's user in this way.
    """
    try:
        with open_file(path) as file:
            status, token = os.fstat(file.fileno()), file.read(1024).strip()
    except OSError as error:
        cure = "copy the file 'token' of the run folder there, and make it readable only by you"
        raise UsageError(f"cannot read the token file {in_one_line(path)} ({error.strerror})", cure) from error
    handed = status.st_uid == 0 != os.geteuid()
    if status.st_mode & (0o037 if handed else 0o077):
        raise UsageError(
            f"the token file {in_one_line(path)} can be read by other users", f"run chmod 600 {quoted(str(path))}"
        )
    if len(token) < 32:
        raise UsageError(
            f"{in_one_line(path)} does not contain a token", "copy the file 'token' of the run folder again"
        )
    return token


@cache
def handshake_key(run_dir: str | None, salt: str) -> bytes:
    """Returns the handshake key of a listener with this salt, in the run of this folder. UsageError: no token file."""
    return make_key(read_token(Path(run_dir or ".") / NAME), salt)


def sign(token: bytes, method: str, path: str, key: str, number: int, body: bytes) -> str:
    """HMAC-SHA-256 of a request. `key` is a challenge of the coordinator, or the session that it gave for one; `number`
    grows with each request of the session, so that none can be sent again.
    """
    head = f"{method} {path}\n{key} {number}\n".encode()
    return hmac.new(token, head + body, "sha256").hexdigest()


def sign_answer(token: bytes, request: str, status: int, body: bytes) -> str:
    """HMAC-SHA-256 of an answer. It includes the signature `request` of the request, so it fits no other request."""
    return hmac.new(token, f"answer {request} {status}\n".encode() + body, "sha256").hexdigest()


def is_signature(given: str, expected: str) -> bool:
    """Whether a signature is the expected one, compared in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def authorization(token: bytes, method: str, path: str, key: str, number: int, body: bytes) -> str:
    """The header of a signed request."""
    return f"{SCHEME} {key} {number} {sign(token, method, path, key, number, body)}"


def read_authorization(header: str) -> tuple[str, int, str] | None:
    """Key, number and signature of a header; None if the header has another form."""
    words = header.split(" ")
    if len(words) != 4 or words[0] != SCHEME or not words[2].isdecimal() or len(words[2]) > 18:
        return None
    return words[1], int(words[2]), words[3]
