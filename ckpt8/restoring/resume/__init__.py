"""``ckpt8.resume``: streams a checkpoint into a live model and optimizer, all or nothing.

Imports what ``ckpt8.restoring`` does.

resume           the function: every check first, then the copy; one live object or several, matched to their entries
model            which saved tensor goes into which live one
optimizer        what becomes of the state of an optimizer: whether a saved state is what a known class keeps, and
                 unknown classes, which load their state themselves
packed_state     for ``ckpt8.optim``: packed state, taken as stored or encoded on the way
live_parameters  which saved parameter is which live one, and the hyperparameters of groups
fills            how a live tensor takes its values, on a GPU from packed parts; values that may stand in live objects
"""
