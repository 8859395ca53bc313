"""What becomes of each argument, variable and command-line option of Horovod.

An argument of the Python API that is in none of the tables is used as in Horovod.
"""

from __future__ import annotations

# Arguments by function, and why they change nothing.
NO_EFFECT = {
    "join(device)": "the zeros are made on the device of the others' tensors",
    "broadcast_optimizer_state(model)": "sparse parameters need no special treatment",
    "ObjectState(get_rank)": "the rank is known",
}

# Arguments by function that are refused for some values, and what to do.
REFUSED = {
    "init(comm)": "ranks of some of the workers, or an MPI communicator: use `process_sets=[hvd.ProcessSet(ranks)]`",
    "ProcessSet(ranks_or_comm)": "an MPI communicator: pass ranks",
    "broadcast_object(obj)": "objects that need pickle: send plain values, or `obj.state_dict()`",
    "allgather_object(obj)": "objects that need pickle: send plain values, or `obj.state_dict()`",
    "reducescatter(op)": "`Adasum`: use `Average` or `Sum`",
    "allreduce(op)": "`Adasum` for a number of workers that is not a power of two: use `Average`",
    "sparse_allreduce_async(op)": "other reductions than `Average` and `Sum`",
}

# Environment variables that are read.
VARIABLES = {
    "HOROVOD_CYCLE_TIME": "milliseconds between two cycles of the negotiation, 1 by default",
    "HOROVOD_FUSION_THRESHOLD": "most bytes that are reduced in one collective, 64 MB by default",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "seconds until workers that did not submit a name are named, 60 by default",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "seconds until that wait ends with an error; 0, the default, is never",
    "HOROVOD_STALL_CHECK_DISABLE": "1 turns both off",
    "HOROVOD_TIMELINE": "a file: rank 0 records a timeline from `hvd.init()` on",
    "HOROVOD_TIMELINE_MARK_CYCLES": "1 marks each cycle in it",
}

# Options of horovodrun, and what takes their place.
LAUNCHER = {
    "-np, --num-proc": "`paceline run --workers N`",
    "-H, --hosts; -hostfile, --hostfile": "`paceline launch ssh --hosts ...`, or slurm, kubernetes, ray, spark, mpi",
    "-p, --ssh-port; -i, --ssh-identity-file": "`~/.ssh/config`, which `paceline launch ssh` uses",
    "--host-discovery-script": "start `paceline run --join` on each new host",
    "--min-np, --min-num-proc": "`paceline run --min-workers N`",
    "--max-np, --max-num-proc": "no limit: workers that join are admitted",
    "--slots-per-host": "`--workers N` of each host",
    "--reset-limit": "`paceline run --max-restarts N`, per cause",
    "--elastic-timeout": "not needed: a run with fewer than `--min-workers` waits",
    "--blacklist-cooldown-range": "not needed: a worker that fails again and again waits longer each time",
    "--start-timeout": "not needed: the launcher sees a worker that ends; others wait 300 s",
    "--output-filename": "`--run-dir FOLDER`: each worker has a log in FOLDER/logs",
    "--fusion-threshold-mb": "`HOROVOD_FUSION_THRESHOLD`, in bytes",
    "--cycle-time-ms": "`HOROVOD_CYCLE_TIME`",
    "--timeline-filename; --timeline-mark-cycles": "`HOROVOD_TIMELINE`, `HOROVOD_TIMELINE_MARK_CYCLES=1`",
    "--no-stall-check": "`HOROVOD_STALL_CHECK_DISABLE=1`",
    "--stall-check-warning-time-seconds": "`HOROVOD_STALL_CHECK_TIME_SECONDS`",
    "--stall-check-shutdown-time-seconds": "`HOROVOD_STALL_SHUTDOWN_TIME_SECONDS`",
    "--network-interfaces": "`GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME`",
    "--disable-cache; --cache-capacity": "not needed: repeated names are always remembered, up to 1024",
    "--autotune and its options": "none: set the two values above by hand",
    "--hierarchical-allreduce; --hierarchical-allgather; --torus-allreduce": "always: inside a host, then between",
    "--gloo; --mpi; --jsrun; --mpi-args; --tcp; --binding-args; --mpi-threads-disable": "none: there is one controller",
    "--num-nccl-streams; --thread-affinity; --gloo-timeout-seconds": "none",
    "--verbose; --log-level; --log-with-timestamp": "none: `paceline logs` and `paceline watch` show a run",
    "--config-file": "none: options are given on the command line",
    "--check-build": "`paceline doctor`",
}
