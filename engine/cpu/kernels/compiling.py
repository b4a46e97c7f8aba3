"""Which kernels there are, and how one becomes an object file."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from . import attention, pool, products, step

I64 = ir.IntType(64)

# What writes each, given its numbers: a format's index in FORMS, and how a product is rounded.
KERNELS: dict[str, Callable[..., Any]] = {
    "run": lambda: pool.run,
    "serve": lambda: pool.serve,
    "end": lambda: pool.end,
    "product": products.product,
    "round": products.rounding,
    "swap": lambda: products.swap,
    "several": lambda: products.several,
    "embedding": products.embedding,
    "write": lambda: attention.write_rows,
    "attend": lambda: attention.attend_pieces,
    "score": attention.scoring,
    "mix": attention.mixing,
    "step": lambda: step.step,
}


def compile_kernel(name: str, numbers: tuple[int, ...]) -> bytes:
    """Return an object file with C's function ``kernel`` of whole numbers."""
    # numba's own wrapper would have the code call Python, to report what is never raised.
    made = KERNELS[name](*numbers)
    count = made.py_func.__code__.co_argcount
    with global_compiler_lock:
        made.compile((types.intp,) * count)
        result = made.overloads[(types.intp,) * count]
        context = cpu_target.target_context
        library = context.codegen().create_library("kernel")
        module = library.create_ir_module("kernel")
        entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), "kernel")
        builder = ir.IRBuilder(entry.append_basic_block())
        called = context.declare_function(module, result.fndesc)
        kinds = result.fndesc.restype, result.fndesc.argtypes
        context.call_conv.call_function(builder, called, *kinds, entry.args)
        builder.ret_void()
        library.enable_object_caching()
        library.add_ir_module(module)
        library.add_linking_library(result.library)
        library.finalize()
        code: bytes = library._get_compiled_object()
    return code
