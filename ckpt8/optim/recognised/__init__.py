"""Optimizers of other packages that ckpt8 recognises and replays, but does not train with: their rules and cards.

``cards`` lists them. The rules are functions like those of ``ckpt8.optim`` (see ``ckpt8.optim.packed_tensor``). They
serve to measure errors in update space and to replay steps.
"""
