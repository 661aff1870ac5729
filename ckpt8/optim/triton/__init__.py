"""Steps of the packed optimizers as Triton kernels: the operations of the torch path, each rounded once.

dispatch    which parameters the kernels update, and the plans of their launches; no triton until there is one
launches    tensors that one launch updates together, their table, and what every prologue does
rules       each rule: its numbers for a tensor, its operations on fp32 blocks; and the launches of a step
kernels     the kernels over blocks, which get the rule as a constant, and all they are made of: the table of tensors,
            how a block is read and written, random bits and rounding, row and column averages for CAME

Kernels for a new rule are a prologue and a rule in ``rules``, as ``lion``, and its line in the table there.
"""
