"""The package core."""
