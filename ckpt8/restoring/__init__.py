"""The package restoring."""
