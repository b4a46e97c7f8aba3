"""Two models on one text: how far their distributions are apart, and how far their layers' outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import ModelError
from tokamac.engine.limits.cost import text_config
from tokamac.engine.tokens import load_tokenizer
from tokamac.quant.calibration import verification_ids
from tokamac.quant.divergence import Quality, compare, concerns

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    from tokamac.quant.streamed import Streamed

__all__ = ["Comparison", "Quality", "Sample", "compare", "concerns", "sample", "verify"]

TOKENS = 256
"""Tokens of a text that are compared, at most. The log-probabilities of 150,000 words then take 150 MB a model."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two models make of a text.

    layers: ‖y − ŷ‖ ÷ ‖y‖ of every layer's output over all positions, each model fed by its own earlier layers, so that errors
    add up from layer to layer; None where that is no finite number. Empty where the models' layers don't correspond.
    """

    quality: Quality
    layers: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens to compare on; or none, and why: ``unable`` is None where there are some."""

    ids: tuple[int, ...]
    unable: str | None = None


def sample(folder: Path, config: dict[str, Any], name: str, text: str, *, tokens: int = TOKENS) -> Sample:
    """Return what ``calibration.verification_ids`` takes from ``text``, in the tokens of the model in ``folder``.

    config: of that folder, normalised; name: what messages call it.
    """
    try:
        ids = tuple(verification_ids(load_tokenizer(folder, config, name), text, tokens))
    except ModelError as error:
        return Sample((), error.message)
    known = text_config(config).get("vocab_size")
    if isinstance(known, int) and any(token >= known for token in ids):
        return Sample((), f"the tokenizer of {name} has tokens that the model does not know")
    return Sample(ids) if len(ids) > 1 else Sample((), "the text has fewer than two tokens")


def verify(reference: "Streamed", other: "Streamed", ids: Sequence[int]) -> Comparison:
    """Run ``ids`` through both, one layer in memory at a time, first all of ``reference``, and compare.

    Held meanwhile: the log-probabilities of both, and the reference's layer outputs, float32 on the host: for 256 tokens about as
    much as the weights of one layer in 16 bits. Raises OptionError where the vocabularies differ, ModelError.
    """
    outputs: list[np.ndarray] = []
    expected = reference.run(ids, watch=lambda _, output: outputs.append(_on_host(output)))
    errors: list[float | None] = []

    def measure(number: int, output: "mx.array") -> None:
        # A model that runs its layers several times over gives more outputs than it has layers.
        if number < len(outputs) and outputs[number].size == output.size:
            errors.append(_relative_error(outputs[number], _on_host(output)))

    found = other.run(ids, watch=measure)
    matching = reference.layers == other.layers == len(outputs) == len(errors)
    return Comparison(compare(expected, found, ids), tuple(errors) if matching else ())


def _on_host(output: "mx.array") -> "np.ndarray":
    import mlx.core as mx
    import numpy as np

    return np.array(output.astype(mx.float32))


def _relative_error(y: "np.ndarray", other: "np.ndarray") -> float | None:
    import numpy as np

    with np.errstate(all="ignore"):
        error = np.linalg.norm((y - other).ravel()) / np.linalg.norm(y.ravel())
    return float(error) if np.isfinite(error) else None
