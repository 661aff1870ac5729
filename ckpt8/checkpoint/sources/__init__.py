"""The package sources."""
