"""Benchmarks that anyone with a GPU can repeat: the cases, how time is taken, what is run."""
