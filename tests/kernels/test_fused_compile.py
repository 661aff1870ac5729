"""The kernels of the fused steps compiled to machine code: nothing spilled, wide accesses, each operation rounded once.

For compute capability 8.0, 9.0 and 10.0, without a GPU, like ``test_compile.py``. bf16 parameters with an int8 residual
and packed moments by default; the other layouts are slow tests.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton.language as tl  # noqa: E402
from test_compile import Compiled, floating  # noqa: E402

from ckpt8.optim.triton import kernels, launches, rules  # noqa: E402

PACKED = {"first": 127, "second": 255, "fourth_root": True, "aligned": True}
PLAIN = {"first": 0, "second": 0, "fourth_root": False, "aligned": True}
LAYOUTS = {
    "bf16": {"weight": "bf16", "levels": 127, "grad": tl.int16, **PACKED},
    "fp32": {"weight": "fp32", "levels": 0, "grad": tl.float32, **PACKED},
    "fp16": {"weight": "fp16", "levels": 0, "grad": tl.float16, **PACKED},
    "linear": {"weight": "bf16", "levels": 0, "grad": tl.int16, **PACKED, "fourth_root": False},
    "small": {"weight": "bf16", "levels": 0, "grad": tl.int16, **PLAIN},
}
POINTERS = {"table": "*i64", "scalars": "*fp32", "programs": "*i32", "grad_scale": "*fp32", "found_inf": "*fp32"}
POINTERS |= {"partials": "*fp64", "runs": "*i64", "matrices": "*i64", "sums": "*fp64", "factors": "*fp32"}
POINTERS |= {"tiles": "*i32", "lines": "*i32"}
VECTORS = {"matrices": None, "factors": None}
ONE_MOMENT = {"second": None}
KERNELS = {
    ("adamw", "step_kernel"): {"rule": "adamw", **VECTORS},
    ("adam", "step_kernel"): {"rule": "adam", **VECTORS},
    ("stable_adamw", "sum_kernel"): {"summand": "ratio", **VECTORS},
    ("stable_adamw", "step_kernel"): {"rule": "stable_adamw", **VECTORS},
    ("sgd", "step_kernel"): {"rule": "sgd", **VECTORS, **ONE_MOMENT},
    ("lion", "step_kernel"): {"rule": "lion", **VECTORS, **ONE_MOMENT},
    ("came", "sum_kernel"): {"summand": "squared_direction", **ONE_MOMENT},
    ("came", "step_kernel"): {"rule": "came", **ONE_MOMENT},
    ("came", "tile_kernel"): {"pair": 1, "even": True, "tile": kernels.TILE},
    ("came", "average_kernel"): {"pair": 0, "line": kernels.LINE},
    ("came", "factor_kernel"): {"pair": 0, "line": kernels.LINE},
    ("came_vector", "sum_kernel"): {"summand": "squared_direction", **VECTORS},
    ("came_vector", "step_kernel"): {"rule": "came", **VECTORS},
}
"""Every kernel over blocks, and its constants; a rule or summand is a function of ``rules``."""

BYTES = {"bf16": (2, 2, 1), "fp32": (4, 4, 0), "fp16": (2, 2, 4), "linear": (2, 2, 2), "small": (2, 2, 2)}
"""Of a gradient, a parameter and what completes it."""

PER_THREAD = kernels.BLOCK // (32 * kernels.OPTIONS["num_warps"])


def fused(kernel, constants, capability: int, folder: Path, options=kernels.OPTIONS) -> Compiled:
    """A kernel that finds its tensors in a table."""
    types = {name: POINTERS.get(name, "i64") for name in kernel.arg_names}
    return Compiled(kernel, types, constants, capability, folder, options)


def block_kernel(module, name, layout, masked, capability, folder) -> Compiled:
    kernel = getattr(kernels if name in ("step_kernel", "sum_kernel") else rules, name)
    constants = {**LAYOUTS[layout], **KERNELS[module, name], "masked": masked, "block": kernels.BLOCK}
    constants |= {key: getattr(rules, constants[key]) for key in ("rule", "summand") if key in constants}
    return fused(kernel, constants, capability, folder)


def assert_nothing_is_spilled(kernel: Compiled, spare: bool = False) -> None:
    """With ``spare`` the assembler may keep two words on the stack where it has registers to spare."""
    assert kernel.usage["LOCAL"] == 0
    assert kernel.usage["STACK"] <= (8 if spare and kernel.usage["REG"] <= 80 else 0)
    # Three programs of 128 threads share a multiprocessor, or five: see below. Triton 3.6 takes more than 3.9.
    assert 0 < kernel.usage["REG"] <= 168


def assert_rounded_once(kernel: Compiled) -> None:
    code = re.sub(r"//.*", "", kernel.ptx)
    assert not re.search(r"\bcall(\.\w+)*\b", code)
    assert not re.search(r"\bfma\.|\.approx|\bdiv\.full", code)
    # CUDA's floor of a subnormal number: it is zero either way, or raised to code 1.
    assert {found for found in floating(kernel) if ".ftz" in found} <= {"cvt.rmi.ftz.f32.f32"}


def narrow(accesses: Counter[int]) -> int:
    """Elements that go by accesses narrower than eight at once: those of numbers of the table are left out."""
    return sum(times for size, times in accesses.items() if size < 4)


def assert_wide(kernel: Compiled, module: str, layout: str) -> None:
    """All by accesses of at least eight elements or 16 bytes, but for one 2-byte scale of each packed moment."""
    grad, param, part = BYTES[layout]
    first = 4 if layout == "small" else 1
    second = first if module in ("adamw", "adam", "stable_adamw", "came_vector") else 0
    loads, stores = kernel.accesses("ld"), kernel.accesses("st")
    moments = [size for size in (first, second) if size]
    scales = 0 if layout == "small" else len(moments)
    assert narrow(stores) == narrow(loads) == scales
    written = (param, part, *moments)
    assert sum(size * times for size, times in stores.items() if size >= 8) == PER_THREAD * sum(written)
    read = sum(size * times for size, times in loads.items() if size >= 8) - 8 * entries(kernel)
    assert read in (PER_THREAD * (grad + sum(written)), PER_THREAD * (grad + sum(written) - param))


def entries(kernel: Compiled) -> int:
    """Loads of numbers of the table: one int64 at an address that all threads share."""
    return len(re.findall(r"ld\.global\.b64 \{ %rd\d+ \}", kernel.ptx))


CAPABILITIES = [
    *((*kernel, 90) for kernel in KERNELS),
    *((module, "step_kernel", capability) for module in ("adamw", "came") for capability in (80, 100)),
]


@pytest.mark.by_default("came-step_kernel-90")
@pytest.mark.parametrize(("module", "name", "capability"), CAPABILITIES)
def test_bf16(tmp_path, module, name, capability):
    kernel = block_kernel(module, name, "bf16", False, capability, tmp_path)
    assert_nothing_is_spilled(kernel)
    assert_rounded_once(kernel)
    if name == "step_kernel":
        assert_wide(kernel, module, "bf16")
    else:
        assert narrow(kernel.accesses("ld")) <= (8 if name == "tile_kernel" else 1)
    if not module.startswith("came"):
        assert kernel.usage["REG"] <= 102


OTHER_LAYOUTS = [
    *((module, "step_kernel", layout, False) for module in ("adamw", "came") for layout in LAYOUTS if layout != "bf16"),
    ("adam", "step_kernel", "fp16", True),
    ("stable_adamw", "sum_kernel", "fp32", True),
    ("stable_adamw", "step_kernel", "linear", True),
    ("sgd", "step_kernel", "small", True),
    ("lion", "step_kernel", "fp32", True),
    ("came", "sum_kernel", "fp16", True),
    ("came", "step_kernel", "bf16", True),
    ("came", "tile_kernel", "fp32", False),
    ("came_vector", "sum_kernel", "linear", True),
    ("came_vector", "step_kernel", "small", True),
]
"""Each layout with both shapes of a second moment; each kernel that a layout changes with another one, and masked."""


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name", "layout", "masked"), OTHER_LAYOUTS)
def test_other_layouts(tmp_path, module, name, layout, masked):
    kernel = block_kernel(module, name, layout, masked, 90, tmp_path)
    assert_nothing_is_spilled(kernel, spare=True)
    assert_rounded_once(kernel)
    if not masked and name == "step_kernel":
        assert_wide(kernel, module, layout)


PROLOGUES = [name for name in vars(rules) if name.endswith(("_prologue", "_clip"))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scaled"), [*((name, True) for name in PROLOGUES), ("adamw_prologue", False)])
def test_prologues(tmp_path, name, scaled):
    """What is done once per tensor, in float64, of which nothing is fused either."""
    kernel = getattr(rules, name)
    constants = {"lr_tensor": None, "maximize": False, "decoupled": True, "nesterov": True}
    constants |= {} if scaled else {"grad_scale": None, "found_inf": None}
    compiled = fused(kernel, constants, 90, tmp_path, launches.PROLOGUE_OPTIONS)
    assert_nothing_is_spilled(compiled)
    assert_rounded_once(compiled)
