"""The program at the terminal: the only place that knows everything else."""
