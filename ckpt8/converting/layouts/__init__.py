"""Layouts of directories: a module each, with ``matches`` and ``assemble``; see ``sources.DirectoryLayout``."""
