"""Reads pickles without running them. Imports the tree and core only."""
