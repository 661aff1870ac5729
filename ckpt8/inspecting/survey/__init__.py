"""What ``inspect`` finds in a checkpoint: red flags in its values, its layers, and the program that wrote it."""
