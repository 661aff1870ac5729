"""The error that a state dict has in update space, in float64 from the tensors of two of them."""

from __future__ import annotations


def adam_update(state, group):
    """The step of Adam and AdamW per unit of learning rate."""
    step, (beta1, beta2) = float(state["step"]), group["betas"]
    m = state["exp_avg"].double() / (1 - beta1**step)
    v = state["exp_avg_sq"].double() / (1 - beta2**step)
    return m / (v.sqrt() + group["eps"])


def stable_update(state, group):
    """That of StableAdamW, whose moments are unbiased already."""
    return state["exp_avg"].double() / (state["exp_avg_sq"].double().sqrt() + group["eps"])


def update_errors(before, after, update=adam_update):
    """NMSE and max |Δu| over all parameters but those with small moments, which stay exact; max |Δu| of each."""
    noise, signal, largest = 0.0, 0.0, {}
    for group in before["param_groups"]:
        for index in group["params"]:
            if before["state"][index]["exp_avg"].numel() >= 4096:
                u, found = (update(each["state"][index], group) for each in (before, after))
                noise += float((found - u).square().sum())
                signal += float(u.square().sum())
                largest[index] = float((found - u).abs().max())
    return noise / signal, max(largest.values()), largest
