"""The exit codes of workers and agents that have a meaning of their own; docs/reference/exit-codes.md explains them."""

STOPPED = 75  # EX_TEMPFAIL: a worker left or the run stopped on request; the same command continues the run
LEFT_BEHIND = 76  # a worker missed steps of the team: it may join again as a newcomer
LEFT_OUT = 79  # the run goes on without the host of this agent
INTERRUPTED = 130  # Ctrl-C, as shells report SIGINT
