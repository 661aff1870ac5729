"""``ckpt8.resume``: streams a checkpoint into a live model and optimizer, all or nothing.

Imports what ``ckpt8.restoring`` does.

resume           the function: every check first, then the copy
given            one live object or several, and the paths for them
matching         which entry of a checkpoint belongs to which of several
model            which saved tensor goes into which live one
optimizer        what becomes of the state of an optimizer; it asks one of
  state_checks     for known classes: whether a saved state is what the class keeps
  own_loading      for unknown classes: they load their state themselves
  packed_state     for ``ckpt8.optim``: packed state, taken as stored or encoded on the way
live_parameters  which saved parameter is which live one
groups           the hyperparameters of parameter groups
live_values      values that may stand in live objects
fills            how a live tensor takes its values, and the plan for an optimizer
gpu_copy         copies to a GPU that upload packed parts
"""
