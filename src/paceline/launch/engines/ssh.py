"""`paceline launch ssh`: starts agents over OpenSSH."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launch.engines.engine import End, Engine, Host
from paceline.launch.engines.tunnel import Tunnel

BROKEN = 255  # ssh's own exit code
FOR_GOOD = ("Permission denied", "Host key verification failed", "Could not resolve hostname", "Bad ", "no such")
# A terminal, the agent's and X11's forwarding are not wanted; nobody is there to answer a question.
OPTIONS = ("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5")


class Ssh(Engine):
    """The options of the user's come first: of two that disagree, ssh takes the first."""

    name = "ssh"

    def __init__(self, places: Sequence[Host], given: Sequence[str] = (), tunnelled: bool = False) -> None:
        super().__init__(places, given)
        self._tunnel = Tunnel([place.name for place in places]) if tunnelled else None
        if self._tunnel:
            self.listen = self._tunnel.addresses[places[0].name]

    def command(self, place: Host) -> list[str]:
        ways = self._tunnel.options(place.name) if self._tunnel else ()
        return ["ssh", *self.given, *OPTIONS, *ways, "--", place.name, "sh"]  # quoted for any login shell

    def way(self, place: Host) -> dict[str, str] | None:
        return self._tunnel.way(place.name) if self._tunnel else None

    def close(self) -> None:
        if self._tunnel:
            self._tunnel.close()

    def end(self, place: Host, code: int, said: str) -> End | None:
        if code != BROKEN:
            return None
        if "forwarding failed" in said:
            return End("failed", said, "let sshd there say AllowStreamLocalForwarding yes, or leave --tunnel out")
        if any(word in said for word in FOR_GOOD):
            return End("failed", said, f"see that `ssh {place.name} true` does not ask or fail")
        return End("lost", said or "the connection broke")
