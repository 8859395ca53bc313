"""Who is here: the coordinator, membership, and transactions of the whole team."""
