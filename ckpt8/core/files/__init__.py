"""Reads files at a position, writes them whole or not at all, and removes temporary files under all circumstances."""
