"""Errors, element types, text, threads, devices and files, for every other package. Imports no other package."""
