"""Words of what kernels are told: what Python writes and machine code reads."""
