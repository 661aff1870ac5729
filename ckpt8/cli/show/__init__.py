"""The package show."""
