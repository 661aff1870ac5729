"""The package checkpoint."""
