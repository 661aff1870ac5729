"""What is in a checkpoint: red flags, layers, origin."""
