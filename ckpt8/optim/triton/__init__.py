"""Steps of the packed optimizers as Triton kernels: the operations of the torch path, each rounded once.

dispatch    which parameters the kernels update, and the plans of their launches
rows        what kernels need to know of a parameter
launches    tensors that one launch updates together, their table, and the launches
adamw ..    one module per rule: its numbers for a tensor, the rule on fp32 blocks, the launches of a step
steps       the kernels over blocks, which get the rule as a constant
blocks      the table of tensors, and how a block of weights, gradients and moments is read and written
matrices    row and column averages, for CAME
prologue    what a rule computes once per tensor and step: step counter, key of the random bits, numbers
arithmetic  random bits, stochastic rounding and master weights, on values in registers

Kernels for a new rule are one module: a prologue kernel, the rule and ``step``, as in ``lion``. Its card names it.
"""
