"""The package dcp."""
