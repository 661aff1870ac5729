"""What the codecs of a budget promise of every element, in float64 from their configurations alone.

``ulp`` is half a unit in the last place of the element type: 0 for fp32, 2^-8 for bf16.
"""

from __future__ import annotations

import torch


def check_weight(x, y, config, ulp):
    """Of a lattice: half a step, and exact zeros."""
    step = 2.0 ** (config["k"] // 4) * torch.tensor(2.0 ** (config["k"] % 4 / 4), dtype=torch.float32).double()
    reach = step * (0.5 + (x.abs() / step + 2) * 2.0**-22)
    assert ((y - x).abs() <= reach + y.abs() * ulp).all()
    assert (y[x == 0] == 0).all()


def check_moment2(x, y, config, ulp):
    """Of rows and columns: half a step of the pseudo-logarithm, and zero where there was zero."""
    bits = [each.float().view(torch.int32).long() for each in (x, y)]
    assert ((y == 0) == (x == 0)).all()
    assert ((bits[1] - bits[0]).abs()[x > 0] <= config["S"] // 2 + 1 + int(ulp * 2**23)).all()


def adam_divisor(v, config):
    """What the rule of Adam divides first moments by."""
    return config["bias1"] * (v.sqrt() / config["root_bias2"] + config["eps"])


def came_divisor(row, column):
    """The same of CAME, from its factored confidence."""
    return (row / row.mean()).sqrt()[:, None] * column.sqrt()[None]


def check_moment1(x, y, divisors, config, ulp):
    """In steps of the divisor of the rule, before and after: an update within half of u_max."""
    u, again = (m / divisor for m, divisor in zip((x, y), divisors, strict=True))
    assert ((again - u).abs() <= config["u_max"] / 2 * (1 + 1e-6) + again.abs() * ulp).all()
