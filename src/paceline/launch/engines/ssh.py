"""`paceline launch ssh`: hosts behind OpenSSH, with the user's own configuration, keys and agent. No torch."""

from __future__ import annotations

from paceline.launch.engines.engine import End, Engine, Host

BROKEN = 255  # ssh's own exit code
# A terminal, the agent's and X11's forwarding are not wanted; nobody is there to answer a question.
OPTIONS = ("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5")


class Ssh(Engine):
    """The options of the user's come first: of two that disagree, ssh takes the first."""

    name = "ssh"

    def command(self, place: Host) -> list[str]:
        return ["ssh", *self.given, *OPTIONS, "--", place.name, "sh"]  # quoted for any login shell

    def end(self, place: Host, code: int, said: str) -> End | None:
        if code != BROKEN:
            return None
        refused = ("Permission denied", "Host key verification failed", "Could not resolve hostname", "Bad ", "no such")
        return End("failed" if any(word in said for word in refused) else "lost", said or "the connection broke")
