"""The kernels in numba's Python and LLVM's vector terms: imported where one must be compiled."""
