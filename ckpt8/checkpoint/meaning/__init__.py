"""Explains the content of a checkpoint: roles, models and optimizers, names of parameters, update rules.

It looks at trees and names, and reads no values but steps and options. Imports readers, container and core.
"""
