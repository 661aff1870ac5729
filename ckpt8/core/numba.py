"""numba kernels for the CPU: they go over memory once, where torch goes over it once for every operation.

A kernel lets go of the GIL and does IEEE arithmetic in the order written (nothing is contracted or reordered). It takes
numbers, flat or rectangular numpy arrays, and tuples of them, writes into arrays, returns nothing or numbers, and
allocates no memory. It may call other kernels. Wrap integers in ``i4`` at every step: otherwise two int32 make an
int64, and a vector holds half as many of those.

numba compiles a kernel once for each machine; ``kernel_cache`` keeps the object code. Importing numba takes half a
second, so a kept kernel does without: LLVM links the object, and ctypes calls the function by numba's convention,

    int kernel(results*, exception**, flat arguments...)

where an array is (owner, parent, elements, bytes of one, data, shape..., strides...) without owner and parent, and a
tuple is its items.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np

from ckpt8.core.kernel_cache import KernelCache, ObjectCode
from ckpt8.core.log import log

i4 = np.int32
f4 = np.float32
f8 = np.float64

MAGNITUDE = 0x7FFFFFFF
"""All bits of an fp32 number but its sign."""

_CTYPES: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_uint8,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}
"""By the name of a type in LLVM; all others are pointers."""

_RESULTS: dict[str, Any] = {
    "bool": ctypes.c_bool,
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}
"""By the name of a type in numba."""

_LIBRARY = frozenset(
    {"memcpy", "memmove", "memset", "sqrtf", "sqrt", "fabsf", "floorf", "ceilf", "rintf", "log", "pread"}
)
"""What a kept kernel may call that is not its own; of the C library."""


_NO_OWNERS = "define void @NRT_MemInfo_call_dtor(ptr %owner) { ret void }"
"""What would free an array: a kernel has none of its own, and views of arrays without an owner."""


class Kernel:
    """A function that is compiled for the types of its arguments, or taken from the cache of this machine."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._linked: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        types, flat = list[Any](), list[Any]()
        _flatten(args, types, flat)
        key = tuple(types)
        linked = self._linked.get(key)
        if linked is None:
            with self._lock:
                linked = self._linked.get(key) or self._link(key, args)
                self._linked[key] = linked
        return linked(args, flat)

    def _link(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> Callable[..., Any]:
        try:
            kept = KernelCache(self.function, key)
            code = kept.load()
            if code is None:
                code = compiled(self, args)
                kept.save(code)
            return _linked(code)
        except Exception as exc:
            dispatcher = self.dispatcher  # Raises where numba cannot be imported.
            log.info("numba calls a kernel, which is not kept: %s", exc)
            return lambda args, _: dispatcher(*args)

    @cached_property
    def dispatcher(self) -> Any:
        """The function as numba compiles and calls it in this process."""
        import numba

        return numba.njit(nogil=True, error_model="numpy")(self.function)

    @property
    def _numba_type_(self) -> Any:
        """What it is to a kernel that calls it."""
        from numba import types

        return types.Dispatcher(self.dispatcher)


def kernel(function: Callable[..., Any]) -> Kernel:
    """Make a kernel of ``function``, which is compiled at its first call."""
    return Kernel(function)


class Foreign:
    """A function of the C library that kernels call, of a ``signature`` in numba's words."""

    def __init__(self, name: str, signature: str) -> None:
        self.__name__, self._signature = name, signature

    def __call__(self, *args: Any) -> int:
        """In a kernel alone."""
        raise NotImplementedError

    @property
    def _numba_type_(self) -> Any:
        """What it is to a kernel that calls it."""
        from numba import types
        from numba.core.sigutils import normalize_signature

        arguments, returned = normalize_signature(self._signature)
        return types.ExternalFunction(self.__name__, returned(*arguments))


_exception = ctypes.c_void_p()
"""Where kernels that fail write the address of their exception, which nobody reads."""

_DATA = object.__basicsize__
"""Where an array object has the address of its elements: numpy's ``PyArrayObject_fields`` begins so, for all to use."""


_pointer_at = ctypes.c_void_p.from_address


def _address(array: np.ndarray[Any, Any]) -> int | None:
    """The address of the elements: ``array.ctypes.data``, which makes several objects on the way to it."""
    return _pointer_at(id(array) + _DATA).value


def _flatten(args: tuple[Any, ...], types: list[Any], flat: list[Any]) -> None:
    """Add the type of every argument, and what stands for it in a call."""
    for arg in args:
        kind = type(arg)
        if kind is np.ndarray and arg.ndim == 1:  # as most are; what numpy says of an array is a new object each time
            count, width = arg.size, arg.itemsize
            if count > 1 and arg.strides[0] != width:
                raise ValueError("a kernel takes contiguous arrays alone")
            types.append((arg.dtype.char, 1))
            flat += (None, None, count, width, _pointer_at(id(arg) + _DATA).value, count, width)
        elif kind is np.ndarray:
            if not arg.flags.c_contiguous:
                raise ValueError("a kernel takes contiguous arrays alone")
            types.append((arg.dtype.char, arg.ndim))
            flat += (None, None, arg.size, arg.itemsize, _address(arg), *arg.shape, *arg.strides)
        elif kind is tuple:
            types.append(len(arg))
            _flatten(arg, types, flat)
        else:
            types.append(kind)
            flat.append(arg.item() if isinstance(arg, np.generic) else arg)


def _signature(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The types of arguments in numba."""
    import numba
    from numba import types

    return tuple(
        types.Array(numba.from_dtype(arg.dtype), arg.ndim, "C")
        if isinstance(arg, np.ndarray)
        else types.Tuple(_signature(arg))
        if isinstance(arg, tuple)
        else numba.typeof(arg)
        for arg in args
    )


def compiled(of: Kernel, args: tuple[Any, ...]) -> ObjectCode:
    """Compile a kernel for arguments such as ``args``. Raises where numba cannot, or is another than those known."""
    import llvmlite.binding as llvm
    import numba

    signature, dispatcher = _signature(args), numba.njit(nogil=True, error_model="numpy")(of.function)
    dispatcher.targetoptions |= {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher.compile(signature)
    result: Any = dispatcher.overloads[signature]
    machine, symbol = result.library.codegen._tm, result.fndesc.mangled_name
    module = llvm.parse_assembly(str(result.library._final_module))
    module.link_in(llvm.parse_assembly(_NO_OWNERS))
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    called = {function.name for function in module.functions if function.is_declaration}
    if foreign := {name for name in called - _LIBRARY if not name.startswith("llvm.")}:
        raise NotImplementedError(f"{of.function.__name__} calls {', '.join(sorted(foreign))}")
    arguments = [str(argument.type) for argument in module.get_function(symbol).arguments]
    returned = result.signature.return_type
    is_tuple = isinstance(returned, numba.types.BaseTuple)
    items = [numba.types.unliteral(item) for item in (returned if is_tuple else [returned])]
    results = [str(item) for item in items if item is not numba.types.none]
    if not _RESULTS.keys() >= set(results):
        raise NotImplementedError(f"{of.function.__name__} returns {returned}")
    return ObjectCode(symbol, arguments, results, is_tuple, machine.emit_object(module))


@cache
def _engine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


_linking = threading.Lock()


def _linked(code: ObjectCode) -> Callable[..., Any]:
    """What calls the function of an object with the arguments as they were, and flat."""
    import llvmlite.binding as llvm

    with _linking:
        engine = _engine()
        engine.add_object_file(llvm.ObjectFileRef.from_data(code.code))
        engine.finalize_object()
        address = engine.get_function_address(code.symbol)
    if not address:
        raise NotImplementedError(f"{code.symbol} is not in its object")
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *(_CTYPES.get(name, ctypes.c_void_p) for name in code.arguments))
    function = prototype(address)
    names = [f"item{k}" for k in range(len(code.results))]
    fields = [(name, _RESULTS[result]) for name, result in zip(names, code.results, strict=True)]
    # A kernel that returns nothing writes a null pointer.
    results = type("Results", (ctypes.Structure,), {"_fields_": fields or [("nothing", ctypes.c_void_p)]})
    problem = ctypes.addressof(_exception)

    def call(_: tuple[Any, ...], flat: list[Any]) -> Any:
        room = results()
        if function(ctypes.addressof(room), problem, *flat):
            raise RuntimeError(f"kernel {code.symbol} failed")
        if code.is_tuple:
            return tuple(getattr(room, name) for name in names)
        return getattr(room, names[0]) if names else None

    return call


def with_bits(*shape: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Memory for fp32 numbers, and the same memory as int32."""
    numbers = np.empty(shape, f4)
    return numbers, numbers.view(i4)


@kernel
def _reads():
    return 0


@kernel
def _writes():
    return 1


def is_kept(*, writes: bool) -> bool:
    """Whether ``start`` has been called on this machine for so much: then most kernels need not be compiled."""
    try:
        return KernelCache((_writes if writes else _reads).function, ()).load() is not None
    except (ImportError, OSError):  # LLVM may find no memory
        return False


def start(*, writes: bool) -> None:
    """Run a kernel that does nothing. Raises whatever keeps numba from compiling it."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        raise RuntimeError("NUMBA_DISABLE_JIT forbids it")
    probe = np.zeros(1)
    if _address(probe) != probe.ctypes.data:
        raise RuntimeError("numpy keeps the address of an array elsewhere than it says")
    (_writes if writes else _reads)()
