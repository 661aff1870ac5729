"""Weights of linear layers in eight bits for inference, in the layout of compressed-tensors.

``scheme`` says how to quantise, ``layers`` chooses the weights, ``codes`` has the maths, ``config`` writes what loaders
read, ``report`` shows the error.
"""
