"""How close a converted model is to its source, in a sentence that a person understands. No figure is computed here."""

from typing import Protocol

from tokamac.app.tui.units import UNKNOWN, count


class Compared(Protocol):
    """What two models said of a text; None is unknown. quant/divergence.py says what each figure is."""

    @property
    def kl(self) -> float | None:
        """Nats a token."""

    @property
    def kl_se(self) -> float | None:
        """Its standard error."""

    @property
    def top1(self) -> float | None:
        """Share of places, 0 to 1."""

    @property
    def perplexity_ratio(self) -> float | None:
        """Result ÷ source."""

    @property
    def positions(self) -> int | None:
        """Places compared."""


def sentence(found: Compared | None, relative_error: float | None) -> str:
    """Return what was found, the plainest first: the same choices, perplexity, KL divergence, the error of the weights."""
    said = [] if found is None else [_choices(found), _perplexity(found), _divergence(found)]
    return "; ".join(part for part in (*said, _weights(relative_error)) if part) or UNKNOWN


def _choices(found: Compared) -> str:
    if found.top1 is None:
        return ""
    return f"its likeliest next token is the source's at {100 * found.top1:.1f} % of {count(found.positions)} places of a text"


def _perplexity(found: Compared) -> str:
    """Return by how much the text surprises the result more than the source."""
    if found.perplexity_ratio is None:
        return ""
    percent = 100 * (found.perplexity_ratio - 1)
    if abs(percent) < 0.05:
        return "perplexity is the same"
    return f"perplexity is {abs(percent):.1f} % {'higher' if percent > 0 else 'lower'}"


def _divergence(found: Compared) -> str:
    if found.kl is None:
        return ""
    spread = "" if found.kl_se is None else f" ± {found.kl_se:.2g}"
    return f"KL divergence {found.kl:.3g}{spread} nats a token"


def _weights(relative_error: float | None) -> str:
    return "" if relative_error is None else f"relative error of its weights {100 * relative_error:.2g} %"
