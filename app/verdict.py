"""What was measured, in words: a reply's diagnosis, what was done where memory was short, how close a conversion came.

The chat and the command line say it alike: in one line, in one sentence, or whole, each number with its formula and the numbers put
in. No figure is computed here. What is unknown is left out, and nothing is promised that was not predicted.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from tokamac.engine.events import MemoryPressure
from tokamac.engine.metrics import Metrics, Throttle
from tokamac.engine.perf.diagnosis import Diagnosis, PartName, Remedy, RemedyName, Term, TimePart, Unit, Waits
from tokamac.engine.perf.memory import giving_way

from . import units
from .units import UNKNOWN, count, percent, rate, seconds

PLACE = re.compile(r"\{(\w+)\}")
"""Another term's key in a formula."""
BOUND: dict[Waits, str] = {
    "memory": "bound by memory",
    "compute": "bound by arithmetic",
    "host": "bound by the host (Python, launching kernels)",
    "overhead": "bound by neither memory nor arithmetic",
    "not memory": "not bound by memory",
}

BRIEFLY: dict[Waits, str] = {**BOUND, "overhead": "bound by overhead", "host": "bound by the host"}
"""For a line that must be short: overhead is all that is neither reading memory nor arithmetic."""
BRIEF_THROTTLED: dict[Throttle, str] = {"thermal": "chip hot", "low power": "Low Power Mode"}
WHOLE = "/explain"
"""What says the rest, in the chat and in the plain one."""


def brief(metrics: Metrics, diagnosis: Diagnosis | None) -> str:
    """Return the line below a reply: its slowest part, what that waited for, and where the rest is said.

    ``3.6 of 4.1 s in prefill, bound by overhead, unusually slow · /explain``
    """
    if metrics.total_s is None or diagnosis is None:
        return sentence(metrics, diagnosis)
    part = diagnosis.slowest
    doing = "before the prompt was read" if part.name == "wait" else f"in {part.name}"
    bound = "" if part.bound is None else BRIEFLY[part.bound]
    throttles = [BRIEF_THROTTLED[each] for each in diagnosis.throttles]
    said = [f"{_of(part.seconds, metrics.total_s)} {doing}", bound, "unusually slow" if part.behind else "", *throttles]
    return f"{', '.join(each for each in said if each)} · {WHOLE}"


def _of(part_s: float, whole_s: float) -> str:
    """Return ``3.6 of 4.1 s``, or ``99 ms of 4.1 s`` where the units differ."""
    part, whole = seconds(part_s), seconds(whole_s)
    amount, unit = part.split(" ", maxsplit=1)
    return f"{amount if whole.split(' ')[1:] == [unit] else part} of {whole}"


def sentence(metrics: Metrics, diagnosis: Diagnosis | None) -> str:
    """Return which part of a reply took the time, what it waited for, how near it came to what is possible, and what helps most."""
    if metrics.total_s is None or metrics.ttft_s is None:
        return "No token was made."
    whole = f"{seconds(metrics.total_s)} in all"
    if diagnosis is None:
        return f"{whole}, {seconds(metrics.ttft_s)} of it before the first token."
    said = [
        f"{whole}, of which {_took(diagnosis.slowest, metrics)}",
        *(THROTTLED[each] for each in diagnosis.throttles),
    ]
    if diagnosis.remedies:
        said.append(remedy_text(diagnosis.remedies[0]))
    elif metrics.cached_tokens and diagnosis.slowest.name == "decode":
        said.append(f"{count(metrics.cached_tokens)} of {count(metrics.prompt_tokens)} prompt tokens were still cached")
    return f"{'; '.join(said)}."


def _took(part: TimePart, metrics: Metrics) -> str:
    time = seconds(part.seconds)
    if part.name == "wait":
        return f"{time} went by before the prompt was read"
    verb, noun, number = "reading", "prompt token", metrics.prefill_tokens
    if part.name == "decode":
        verb, noun, number = "writing", "token", metrics.generated_tokens
    bound = "" if part.bound is None else BOUND[part.bound]
    how = ": ".join(each for each in (bound, reached_text(part)) if each)
    tokens = f"{count(number)} {noun}{'' if number == 1 else 's'}"
    return f"{time} {verb} {tokens} ({part.name}{f', {how}' if how else ''})"


def reached_text(part: TimePart) -> str:
    """Return how near a phase came to what the machine allows, and to what is expected there; empty where neither is known."""
    said = [] if part.of_ceiling is None else [f"{percent(part.of_ceiling)} of what this machine allows"]
    if part.of_expected is not None:
        only = "only " if part.behind and part.of_expected >= 0.01 else ""
        said.append(f"{only}{percent(part.of_expected)} of what is expected")
    return " and ".join(said)


def remedy_text(remedy: Remedy) -> str:
    """Return a change and what it is predicted to bring: ``4-bit weights: decode from 12.0 to 31.0 tok/s, 8.1 s less``."""
    parts = ["", "", f"{seconds(remedy.gain_s)} less"]
    if remedy.before_s is not None and remedy.after_s is not None:
        parts[0] = f"prefill from {seconds(remedy.before_s)} to {seconds(remedy.after_s)}"
    if remedy.before_tps is not None and remedy.after_tps is not None:
        parts[1] = f"decode from {rate(remedy.before_tps).partition(' ')[0]} to {rate(remedy.after_tps)}"
    match remedy.name:
        case "packed keys and values":
            name = f"{remedy.to}-bit keys and values"
            parts[1] += " at this context" if parts[1] else ""
        case "packed weights":
            name = f"{remedy.to}-bit weights"
        case "shorter context":
            name = f"half the prompt ({count(remedy.to)} tokens)"
        case "prompt cache":
            name = "with the prompt cache, this prompt once read"
            parts[2] += " to the first token"
        case "quiet machine":
            name = "with this machine undisturbed"
        case "full power":
            name = "with Low Power Mode off and this machine undisturbed"
        case "cool chip":
            name = "with a cool chip and this machine undisturbed"
    return f"{name}: {', '.join(part for part in parts if part)}"


HOW: dict[RemedyName, str] = {
    "packed keys and values": "--kv-bits 8; in the chat /settings",
    "packed weights": "tokamac convert MODEL --bits 4",
    "shorter context": "a shorter prompt, a new chat, or --kv-window",
    "prompt cache": "leave out --no-prompt-cache",
    "quiet machine": "close what else computes, and let the machine cool",
    "full power": "System Settings > Battery, on a desktop Mac Energy",
    "cool chip": "let the machine cool, and close what else computes",
}
"""How each change is made."""

THROTTLED: dict[Throttle, str] = {
    "thermal": "macOS slowed the chip down because of its heat",
    "low power": "Low Power Mode was on, which slows the chip down",
}
RELIEF: dict[Throttle, RemedyName] = {"thermal": "cool chip", "low power": "full power"}
"""What ends it."""
DOING: dict[PartName, str] = {
    "wait": "before the prompt was read: its turn, tokenizing, restoring the prompt cache",
    "prefill": "reading the prompt",
    "decode": "writing the reply",
}


def value_text(value: float | None, unit: Unit) -> str:
    """Return a number with its unit; None is unknown."""
    if value is None:
        return units.UNKNOWN
    match unit:
        case "GB/s":
            return units.bandwidth(value)
        case "bytes":
            return units.size(round(value))
        case "s":
            return (
                units.milliseconds(value * 1e3)
                if value < 1
                else units.seconds(value)
                if value >= 3600
                else f"{value:,.2f} s"
            )
        case "tok/s":
            return units.rate(value)
        case "TFLOP/s":
            return f"{_scaled(value * 1e12)}/s"
        case "FLOP":
            return _scaled(value)
        case "FLOP/byte":
            return f"{value:,.1f} FLOP/byte"


def words(term: Term, terms: Sequence[Term]) -> str:
    """Return a term's formula with the names of the others in it."""
    names = {each.key: each.name for each in terms}
    return PLACE.sub(lambda found: names.get(found[1], found[0]), term.formula)


def numbers(term: Term, terms: Sequence[Term]) -> str:
    """Return a term's formula with the others' values put in; empty where it names none, or one of them is unknown."""
    if term.value is None:
        return ""
    values = {each.key: value_text(each.value, each.unit) for each in terms}
    return PLACE.sub(lambda found: values.get(found[1], found[0]), term.formula) if PLACE.search(term.formula) else ""


def part_text(part: TimePart) -> str:
    """Return what a part of the time was, what it waited for, and how near it came to what is possible."""
    said = [DOING[part.name], "" if part.bound is None else BOUND[part.bound], reached_text(part)]
    return "; ".join(each for each in said if each)


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the whole, line by line."""
    for part in diagnosis.parts:
        yield f"{part.name:<9} {units.seconds(part.seconds)}: {part_text(part)}"
    for term in diagnosis.terms:
        yield f"{term.concern:<9} {_equation(term, diagnosis.terms)}"
    for throttle in diagnosis.throttles:
        yield f"machine   {THROTTLED[throttle]} ({HOW[RELIEF[throttle]]})"
    for remedy in diagnosis.remedies:
        yield f"remedy    {remedy_text(remedy)} ({HOW[remedy.name]})"


def _equation(term: Term, terms: Sequence[Term]) -> str:
    value = value_text(term.value, term.unit)
    if not PLACE.search(term.formula):
        return f"{term.name} = {value} ({term.formula})"
    return " = ".join(each for each in (term.name, words(term, terms), numbers(term, terms), value) if each)


def _scaled(operations: float) -> str:
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if operations >= size:
            return f"{operations / size:,.3g} {prefix}FLOP"
    return f"{operations:,.0f} FLOP"


def pressure_sentence(event: MemoryPressure) -> str:
    """Return what was done, what it costs other programs, and the memory that is expected now, beside what may be used."""
    done = ["a piece of the prompt did not fit and is computed again"] if event.failed else []
    if event.pool_bytes:
        done.append(f"{units.size(event.pool_bytes)} of unused buffers were given back")
    if event.fused_bytes:
        done.append(f"attention runs fused, which is slower and takes {units.size(event.fused_bytes)} less")
    if event.chunk is not None:
        done.append(f"the prompt is read {units.count(event.chunk)} tokens at a time")
    if event.cache_bytes:
        done.append(f"{units.size(event.cache_bytes)} of earlier prompts were let go of")
    if event.from_others:
        done.append(giving_way(event.from_others))
    if event.ended:
        done.append("the reply ends here, since more of it would not fit")
    needed = units.size(event.predicted_bytes)
    of = needed if event.budget_bytes is None else f"{needed} of {units.size(event.budget_bytes)}"
    expected = f"that would take {of}" if event.ended else f"{of} are expected to be used"
    short = "memory pressure is critical" if event.critical else "memory is short"
    return f"{short}: {'; '.join([', '.join(done), expected] if done else [expected])}"


class ModelComparison(Protocol):
    """What two models said of a text; None is unknown. quant/report.py says what each figure is."""

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


def closeness(found: ModelComparison | None, relative_error: float | None) -> str:
    """Return what was found, the plainest first: the same choices, perplexity, KL divergence, the error of the weights."""
    said = []
    if found is not None and found.top1 is not None:
        share = f"{100 * found.top1:.1f} % of {count(found.positions)} positions"
        said.append(f"picks the same next token as the original in {share}")
    if found is not None and found.perplexity_ratio is not None:
        more = 100 * (found.perplexity_ratio - 1)
        by = f"{abs(more):.1f} % {'higher' if more > 0 else 'lower'}" if abs(more) >= 0.05 else "the same"
        said.append(f"perplexity is {by}")
    if found is not None and found.kl is not None:
        spread = "" if found.kl_se is None else f" ± {found.kl_se:.2g}"
        said.append(f"KL divergence {found.kl:.3g}{spread} nats a token")
    if relative_error is not None:
        said.append(f"relative error of its weights {100 * relative_error:.2g} %")
    return "; ".join(said) or UNKNOWN
