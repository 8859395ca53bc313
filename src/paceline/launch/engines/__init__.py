"""What starts a run on other hosts: one module for each kind of cluster, and what they share."""
