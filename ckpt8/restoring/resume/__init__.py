"""``ckpt8.resume``: streams a checkpoint into a live model and optimizer, all or nothing.

Imports what ``ckpt8.restoring`` does.

resume     the function: every check first, then the copy; one live object or several, matched to their entries
live       which saved tensor or parameter is which live one, and the hyperparameters of groups
optimizer  what becomes of the state of an optimizer: whether a saved state is what a known class keeps, and unknown
           classes, which load their state themselves
new_state  how live state takes its values, on a GPU from packed parts; packed state, taken as stored or encoded
"""
