"""The package pickle."""
