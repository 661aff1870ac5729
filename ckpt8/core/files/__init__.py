"""The package files."""
