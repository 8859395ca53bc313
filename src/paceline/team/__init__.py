"""Who is here: the team that a worker joins."""
