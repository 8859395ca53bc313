"""What starts a run on other hosts: SSH, Slurm, Kubernetes, Ray, Spark and MPI."""
