"""Refusing what is no finite number, by the name of the tensor that holds it."""

import mlx.core as mx

from tokamac.engine.errors import ConversionError

AGAIN = "Download the model again, or ask its author."
"""What to do where the source itself holds such values: no option of a conversion helps."""


def not_finite(name: str, hint: str = AGAIN) -> ConversionError:
    """Return the error to raise for a tensor that holds NaN or infinities."""
    return ConversionError(f"{name} holds values that are not finite numbers", hint)


def check_finite(name: str, *arrays: mx.array, hint: str = AGAIN) -> None:
    """Raise ConversionError, naming the tensor, unless all values of the arrays are finite numbers. Evaluates them."""
    if not all(bool(mx.all(mx.isfinite(array)).item()) for array in arrays):
        raise not_finite(name, hint)
