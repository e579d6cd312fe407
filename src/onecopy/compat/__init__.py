"""Code written for other libraries, over sharded models: an import changes, and nothing else."""
