"""Products on a plain CPU, where MLX has no GPU: everything here can go on the day when MLX's own kernels are as fast.

MLX's CPU backend unpacks weights slowly, with one thread, and multiplies matrices with a reference BLAS some thirty times slower
than NumPy's. So packed weights are multiplied as they lie, by kernels that numba compiles (products.py, tiles.py) and threads of
their own (pool.py); plain ones, in float32, by NumPy (dense.py). The engine imports this where MLX computes on a CPU, and nowhere
else; this module alone imports nothing.
"""
