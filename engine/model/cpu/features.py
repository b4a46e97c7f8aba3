"""Which vector instructions this CPU has, as LLVM names them. Imports nothing slow: what is kept of a machine asks, too."""

from llvmlite import binding

FEATURES = frozenset(name for name, there in binding.get_host_cpu_features().items() if there)

ADDS_PRODUCTS = {"avx512f", "avx512bw", "avx512vl", "avx512vnni"} <= FEATURES
"""Whether four products of bytes are added to a sum by one instruction."""

ADDS_PAIRS = "avx2" in FEATURES
"""Whether two are, in 16 bits."""

SHIFTS_BYTES = "avx512vbmi" in FEATURES
"""Whether weights of odd widths are spread to bytes by two."""

ROUNDED_BITS = ((2, 3, 4, 5, 6, 8) if SHIFTS_BYTES else (2, 4, 8)) if ADDS_PRODUCTS else (2, 4) if ADDS_PAIRS else ()
"""Widths of affine weights that are multiplied with rounded rows."""
