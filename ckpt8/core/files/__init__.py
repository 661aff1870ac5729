"""Files: read at a place, written whole or not at all, temporary files that nothing leaves behind."""
