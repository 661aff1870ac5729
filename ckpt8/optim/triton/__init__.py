"""Steps of the packed optimizers as Triton kernels: the operations of the torch path, each rounded once.

dispatch    which parameters the kernels update, and the plans of their launches; no triton until there is one
launches    tensors that one launch updates together, their table, and the launches
rows        what kernels need to know of a parameter
adamw ..    one module per rule: its numbers for a tensor, the rule on fp32 blocks, the launches of a step
kernels     the kernels over blocks, which get the rule as a constant, and all they are made of: the table of tensors,
            how a block is read and written, random bits and rounding, row and column averages for CAME
prologue    what a rule computes once per tensor and step: step counter, key of the random bits, numbers

Kernels for a new rule are one module: a prologue kernel, the rule and ``step``, as in ``lion``. Its card names it.
"""
