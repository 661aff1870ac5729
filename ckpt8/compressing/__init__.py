"""The package compressing."""
