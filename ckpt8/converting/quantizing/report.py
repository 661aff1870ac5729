"""Reports what quantising did to the weights of a model, for people and for ``--json``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt8.converting.quantizing.codes import QuantizationError
from ckpt8.converting.quantizing.layers import Layers, class_of
from ckpt8.converting.quantizing.scheme import Scheme


def summary(scheme: Scheme, errors: Mapping[str, QuantizationError], layers: Layers) -> dict[str, Any]:
    """The settings, the error of all weights, by kind of layer and by tensor (worst first), and what was kept.

    Every error has elements, max_relative, rms_relative, snr_db (None without an error) and zeroed; see
    ``QuantizationError``. ``kept`` gives the reason for each module whose matrix stayed as it is.
    """
    classes: dict[str, list[str]] = defaultdict(list)
    for name in errors:
        classes[class_of(name)].append(name)
    by_class = [
        {"class": kind, "tensors": len(names), **_sum(errors[name] for name in names).figures()}
        for kind, names in classes.items()
    ]
    by_tensor = [{"tensor": name, **error.figures()} for name, error in errors.items()]
    return {
        "dtype": scheme.dtype.label,
        "scale": scheme.scale,
        "per": scheme.per,
        "all": {"tensors": len(errors), **_sum(errors.values()).figures()},
        "classes": sorted(by_class, key=_noise),
        "tensors": sorted(by_tensor, key=_noise),
        "kept": dict(layers.kept),
    }


def lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """The summary for a terminal."""
    whole, worst = facts["all"], facts["tensors"][0]
    yield f"quantised   {whole['tensors']:,} matrices to {facts['dtype']}, {facts['scale']} scales per {facts['per']}"
    yield f"error       {_error(whole)}"
    for each in facts["classes"]:
        yield f"            {each['class']} ({each['tensors']:,}): {_error(each)}"
    yield f"worst       {worst['tensor']}: {_error(worst)}"
    reasons: dict[str, list[str]] = defaultdict(list)
    for module, reason in facts["kept"].items():
        reasons[reason].append(module)
    for reason, modules in reasons.items():
        more = f" and {len(modules) - 1:,} more" if len(modules) > 1 else ""
        yield f"bf16        {modules[0]}{more}: {reason}"


def _sum(errors: Any) -> QuantizationError:
    found = QuantizationError()
    for error in errors:
        found.merge(error)
    return found


def _noise(facts: Mapping[str, Any]) -> float:
    return float("inf") if facts["snr_db"] is None else float(facts["snr_db"])


def _error(facts: Mapping[str, Any]) -> str:
    if facts["snr_db"] is None:
        return "none"
    zeroed = f", {facts['zeroed'] / facts['elements']:.2g} of the weights became 0" if facts["zeroed"] else ""
    return (
        f"SNR {facts['snr_db']:.1f} dB, relative error of a weight RMS {facts['rms_relative']:.3g}, "
        f"max {facts['max_relative']:.3g}{zeroed}"
    )
