"""The package layouts."""
