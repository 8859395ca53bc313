"""Parameter servers: synchronous, bounded-stale and asynchronous, with backup workers."""
