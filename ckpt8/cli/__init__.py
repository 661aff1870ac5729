"""The package cli."""
