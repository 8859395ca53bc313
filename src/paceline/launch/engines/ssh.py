"""`paceline launch ssh`: the ssh command that starts an agent on each host, and what its end means."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.launch.engines.engine import End, Engine, Host
from paceline.launch.engines.tunnel import Tunnel

BROKEN = 255  # ssh's own exit code
FOR_GOOD = ("Permission denied", "Host key verification failed", "Could not resolve hostname", "Bad ", "no such")
# No terminal, no agent forwarding, no X11 forwarding, and no questions.
OPTIONS = ("-T", "-a", "-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "-o", "ServerAliveInterval=5")


class Ssh(Engine):
    """Starts agents with OpenSSH. The user's options come first, because ssh uses the first of two that disagree."""

    name = "ssh"

    def __init__(self, hosts: Sequence[Host], given: Sequence[str] = (), tunnelled: bool = False) -> None:
        super().__init__(hosts, given)
        self._tunnel = Tunnel([host.name for host in hosts]) if tunnelled else None
        if self._tunnel:
            self.listen = self._tunnel.addresses[hosts[0].name]

    def command(self, host: Host) -> list[str]:
        """Runs ``sh`` on the host with ssh, with the forwarded sockets of the tunnel if there is one."""
        ways = self._tunnel.options(host.name) if self._tunnel else ()
        return ["ssh", *self.given, *OPTIONS, *ways, "--", host.name, "sh"]  # quoted for any login shell

    def tunnel_arguments(self, host: Host) -> dict[str, str] | None:
        """The host's arguments for `tunnel.inside`, if there is a tunnel."""
        return self._tunnel.arguments(host.name) if self._tunnel else None

    def close(self) -> None:
        """Removes the files of the tunnel."""
        if self._tunnel:
            self._tunnel.close()

    def why_ended(self, host: Host, code: int, last_line: str) -> End | None:
        """``failed`` if another attempt would fail, too, ``lost`` for other ends of ssh itself."""
        if code != BROKEN:
            return None
        if "forwarding failed" in last_line:
            return End("failed", last_line, "set AllowStreamLocalForwarding yes for sshd there, or leave --tunnel out")
        if any(word in last_line for word in FOR_GOOD):
            return End("failed", last_line, f"make sure that `ssh {host.name} true` succeeds without a question")
        return End("lost", last_line or "the connection broke")
