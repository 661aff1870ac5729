"""Pickles read without running them. Imports the tree and core only."""
