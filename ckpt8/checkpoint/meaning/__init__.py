"""The package meaning."""
