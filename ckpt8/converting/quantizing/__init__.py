"""Weights of linear layers in eight bits for inference, in the layout of compressed-tensors.

``scheme`` says how, ``layers`` which; ``scales`` and ``codes`` have the maths; ``config`` writes what loaders read.
"""
