"""Starting one run and coming back with an outcome: local processes, forked ranks, Slurm."""
