"""What an explanation of a figure is, and the inputs that several figures share. Plain values."""

from dataclasses import dataclass

from tokamac.app.tui import units
from tokamac.app.tui.session import Session
from tokamac.app.verdict_full import value_text, words

CLOCK = "the engine's clock"
COUNTED = "counted by the engine"
MEASURED = f"measured by {CLOCK}"
NO_REPLY = "no reply has been made yet"
NOT_YET = "the reply has not come that far"


@dataclass(frozen=True, slots=True)
class Input:
    """A number that goes into a figure: with its unit, and where it comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True, slots=True)
class Explained:
    """A figure in words. value: with its unit, "unknown" where it is. why: why it is unknown; "" where it is known.

    source: where the figure itself comes from. meaning: one sentence.
    """

    name: str
    value: str
    formula: str
    inputs: tuple[Input, ...]
    source: str
    meaning: str
    why: str = ""


def terms(session: Session, *keys: str) -> tuple[Input, ...]:
    """Return numbers of the diagnosis, as far as it has them."""
    terms = () if session.diagnosis is None else session.diagnosis.terms
    return tuple(
        Input(term.name, value_text(term.value, term.unit), words(term, terms)) for term in terms if term.key in keys
    )


def bandwidth(session: Session) -> tuple[Input, ...]:
    """Return the memory's bandwidth, and who says so."""
    known = terms(session, "bandwidth")
    source = "the table of chips, or measured on this machine"
    return known or (Input("bandwidth", units.bandwidth(session.bandwidth_gbs), source),)


def step(session: Session) -> tuple[Input, ...]:
    """Return what a step reads: of the last step while a reply is written, else of the one in its middle."""
    if session.live is not None and session.replying:
        return (
            Input("bytes a step", units.size(session.live.bytes_per_step), "weights, keys and values: the last step's"),
        )
    m = session.metrics
    return (
        Input(
            "weights a step", units.size(None if m is None else m.weight_bytes_per_token), "counted from the tensors"
        ),
        Input("keys and values", units.size(None if m is None else m.kv_bytes_per_step), "in the middle of the reply"),
    )
