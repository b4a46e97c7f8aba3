"""The matrices that a model multiplies with, by shape and packing: what a decode step reads, as kernels see it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from tokamac.engine.limits.cost import Tensor, active_share, cost_of_tensors, part_of
from tokamac.engine.limits.leaves import added_matrices, leaf_modules

TERNARY = "ternary"
"""The mode of BitNet's matrices: four weights of three values each to a byte, stacked along the rows, with one scale for all."""


@dataclass(frozen=True, slots=True)
class Product:
    """Matrices alike: (rows, columns), packed with ``bits`` in groups (None: floats), ``count`` of them in the model.

    stack: matrices in one array, of which a token multiplies with ``active``: all of them, or a mixture's chosen experts. 1 and 1
    for a plain matrix. A convolution along the tokens counts as a stack too: a row of its weights a channel. head: it makes logits,
    so prefill uses it once.
    """

    rows: int
    columns: int
    bits: int | None
    group_size: int = 64
    mode: str = "affine"
    stack: int = 1
    active: int = 1
    head: bool = False
    count: int = 1

    def nbytes(self, value_bytes: int) -> int:
        """Bytes of one matrix that a token reads. value_bytes: of a number that is not packed: weights, scales, biases."""
        weights = self.rows * self.columns * self.active
        if self.bits is None:
            return weights * value_bytes
        # Affine groups have a scale and a bias each, microscaled ones a scale of one byte.
        group_bytes = {"affine": 2 * value_bytes, TERNARY: 0}.get(self.mode, 1)
        return round(weights * (self.bits / 8 + group_bytes / self.group_size))

    @property
    def parameters(self) -> int:
        """Weights that a token is multiplied with, of all matrices alike."""
        return self.rows * self.columns * self.active * self.count

    @property
    def key(self) -> str:
        """What names it in a file of measurements."""
        packing = "float" if self.bits is None else f"{self.mode} {self.bits} in {self.group_size}"
        stack = "" if self.stack == 1 else f" {self.active} of {self.stack}"
        return f"{self.rows}x{self.columns} {packing}{stack}"


def products_of(model: Any, config: Mapping[str, Any]) -> tuple[Product, ...]:
    """Return the products of mlx-lm's module, loaded or hollow. A mixture that does not say how many of its experts a token chooses
    gets one of each stack."""
    leaves = leaf_modules(model)
    matrices = {path: module for path, module in leaves if "weight" in module and module.weight.ndim in (2, 3)}
    parts = {path: part_of(_tensor(path, module), config) for path, module in matrices.items()}
    used, experts = active_share(config) or (1, 1)
    found: dict[Product, Fraction] = {}
    for path, module in matrices.items():
        part = parts[path]
        if part == "embedding" and ("head" in parts.values() or _is_looked_up(path, module, config)):
            continue
        product = _product(module, used if part == "experts" else None, head=part in ("embedding", "head"))
        listed = part == "experts" and module.weight.ndim == 2  # one module an expert (dbrx): some of them are chosen
        found[product] = found.get(product, Fraction(0)) + (Fraction(used, experts) if listed else 1)
    for path, matrix in added_matrices(model):
        part = part_of(Tensor(path, "BF16", tuple(matrix.shape), int(matrix.nbytes)), config)
        if part == "embedding" and ("head" in parts.values() or path.endswith("lora_a")):
            continue  # its rows are looked up, as the table's are
        product = _added(matrix, used if part == "experts" else None, head=part in ("embedding", "head"))
        found[product] = found.get(product, Fraction(0)) + 1
    in_order = sorted(found.items(), key=lambda item: item[0].head)  # wherever the class keeps its head
    return tuple(replace(product, count=int(count)) for product, count in in_order)


def _product(module: Any, used: int | None, *, head: bool) -> Product:
    """used: of a stack's matrices by a token; None: all of them (MLA keeps one a head)."""
    *stack, rows, columns = module.weight.shape
    bits = module.bits if "scales" in module else None
    if "weight_scale" in module:
        rows, bits = 4 * rows, 2
    packed = "scales" in module
    whole = stack[0] if stack else 1
    return Product(
        rows=rows,
        columns=columns * 32 // bits if packed else columns,
        bits=bits,
        group_size=module.group_size if packed else 64,
        mode=module.mode if packed else "affine" if bits is None else TERNARY,
        stack=whole,
        active=whole if used is None else min(used, whole),
        head=head,
    )


def _added(matrix: Any, used: int | None, *, head: bool) -> Product:
    """Return the product with one of an adapter's matrices: (in, r) and (r, out), or of a stack (r, in) and (out, r)."""
    *stack, rows, columns = matrix.shape
    whole = stack[0] if stack else 1
    if not stack:
        rows, columns = columns, rows
    return Product(rows, columns, None, stack=whole, active=whole if used is None else min(used, whole), head=head)


def _is_looked_up(path: str, module: Any, config: Mapping[str, Any]) -> bool:
    """Whether a table is never the output head: positions, and the inputs of single layers (gemma3n)."""
    return cost_of_tensors([_tensor(path, module)], config).weight_bytes_per_token == 0


def _tensor(path: str, module: Any) -> Tensor:
    return Tensor(f"{path}.weight", "BF16", tuple(module.weight.shape), int(module.weight.nbytes))
