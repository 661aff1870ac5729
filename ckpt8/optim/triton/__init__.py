"""Steps of the packed optimizers as Triton kernels: the operations of the torch path, each rounded once.

device    formulas on values in registers: random bits, stochastic rounding, master weights
state     the table of tensors, and how a block of weights, gradients and moments is read and written
prologue  what is computed once per tensor and step, on the device: step counter, key of the random bits, scalars
adamw ..  one module per rule: the rule on fp32 blocks, its kernels, and the function that launches them
plan      tensors that one launch updates together, and their table
dispatch  which parameters are updated here, and why the others are not
"""
