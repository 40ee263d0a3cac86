"""The composition root: everything is wired here, and nowhere else."""
