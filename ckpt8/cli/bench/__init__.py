"""The measurements of ``ckpt8 bench``: a checkpoint, which may be synthetic, or kernels and steps of a device."""
