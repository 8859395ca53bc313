"""`paceline run --raw`: what an unchanged script of torch.distributed needs, and which options make no sense for it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import fields

from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions

GRACE = 30.0  # seconds that workers may take to end after a signal, as under torchrun

_STATE = "the script keeps its own checkpoints"
_STATIC = "the team of a script that trains by itself cannot change"
_ONE_HOST = "a script that trains by itself runs on this host only"
_FIGURES = "Paceline does not see the steps of a script that trains by itself"
# Every option of `paceline run`, in one of two tables: by name the use of those that work with --raw, and by the field
# of LaunchOptions the name, the reason and the cure of those that are refused.
USED = {
    "--workers": "number of processes, WORLD_SIZE in the script",
    "-m": "runs a module",
    "--run-dir": "folder of the logs and the journal",
    "--max-restarts": "how often all workers are restarted after a failure",
    "--hang-timeout": "kills a worker that makes no progress",
    "--max-time": "stops all workers after this time",
    "--cold-start": "starts each worker as a new interpreter",
    "--quiet": "prints only how the run ended, and only if it did not finish",
    "--notify": "command for failures, hangs and the end",
    "--debug": "gives one worker the terminal",
    "--raw": "itself",
    "--config": "options, script, arguments, and what paceline.config() returns",
    "--set": "changes of what paceline.config() returns",
}
REFUSED = {
    "plan": ("--plan", "a plan is for the Trainer", "leave it out: the script itself decides how the work is spread"),
    "shares": ("--shares", "shares are for the Trainer", "leave it out: the script itself divides its data"),
    "save_every": ("--save-every", _STATE, "set the interval in the script"),
    "keep": ("--keep", _STATE, "set their number in the script"),
    "checkpoints": ("--checkpoints", _STATE, "set their folder in the script"),
    "mirror": ("--mirror", _STATE, "leave it out"),
    "max_steps": ("--steps", "the script counts its own steps", "pass the script's own option after its name"),
    "tensorboard": ("--tensorboard", _FIGURES, "write TensorBoard files in the script"),
    "log_to": ("--log-to", _FIGURES, "call the logger in the script"),
    "progress": ("--progress", _FIGURES, "leave it out"),
    "heal": ("--heal", "the script keeps its own weights", "leave it out"),
    "verify_steps": ("--verify-steps", "the script makes its own steps", "leave it out"),
    "spares": ("--spares", _STATIC, "leave it out: a failure restarts all workers"),
    "min_workers": ("--min-workers", _STATIC, "leave it out: a failure ends all workers"),
    "exclude_after": ("--exclude-after", _ONE_HOST, "leave it out"),
    "join": ("--join", _STATIC, "start all workers with one command"),
    "token_file": ("--token-file", _STATIC, "leave it out"),
    "listen": ("--listen", _ONE_HOST, "leave it out; for several hosts use torchrun with the backend paceline"),
    "nodes": ("--nodes", _ONE_HOST, "leave it out; for several hosts use torchrun with the backend paceline"),
    "store": ("--store", _ONE_HOST, "leave it out"),
    "against": ("--against", _FIGURES, "leave it out"),
    "metrics": ("--metrics", _FIGURES, "leave it out"),
    "page": ("--page", _FIGURES, "leave it out; `paceline stacks` shows what the workers do"),
    "verbose": ("--verbose", "a run with --raw has no report", "leave it out"),
    "take_over": ("--take-over", _ONE_HOST, "start the run again"),
}


def refuse_options(options: LaunchOptions) -> None:
    """Raises UsageError if an option was given that makes no sense with --raw."""
    defaults = {field.name: field.default for field in fields(options)}
    for name, (option, reason, cure) in REFUSED.items():
        if name in defaults and getattr(options, name) != defaults[name]:
            raise refusal(option, reason, cure)


def refusal(option: str, reason: str, cure: str) -> UsageError:
    """The error for an option that cannot be combined with --raw."""
    return UsageError(f"{option} cannot be combined with --raw: {reason}", cure)


def hold_port(address: str) -> socket.socket:
    """Binds a free port for worker 0's store, so that no other program gets it before worker 0 listens there.

    The socket itself never listens, and both ends share the port (SO_REUSEADDR).
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def worker_variables(options: LaunchOptions, run_id: str, rank: int, store: tuple[str, int]) -> Mapping[str, str]:
    """The variables that torchrun sets for a worker, with those values; `store` is worker 0's address."""
    size = str(options.workers)
    return {
        "PACELINE_RAW": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(options.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
    }
