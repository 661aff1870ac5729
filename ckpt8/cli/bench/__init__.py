"""Benchmarks: checkpoints come from real training runs, never from random numbers."""
