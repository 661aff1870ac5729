"""``ckpt8.resume``: a checkpoint streamed into a live model and optimizer, all or nothing.

source        a ``.ckpt8`` or a raw checkpoint as one and the same open checkpoint
find          which entries of its tree are the model and the optimizer
names         parameter names without the prefixes of wrappers
model         which saved tensor goes into which live one
layouts       the state that each known optimizer keeps
optimizer     which saved state belongs to which live parameter
state_checks  whether the state of one parameter is what the optimizer keeps
own_loading   optimizers that load their state by themselves
values        values for live objects, none of which stands for an object
groups        hyperparameters of parameter groups
rest          the tree without what was consumed
streaming     the copy, in pieces of bounded size
run           all of it in order: every check first, then the copy
"""
