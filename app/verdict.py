"""What was measured, in words: a reply's diagnosis, what was done where memory was short, how close a conversion came.

The chat and the command line say it alike: in one line, in one sentence, or whole, each number with its formula and the numbers put
in. No figure is computed here. What is unknown is left out, and nothing is promised that was not predicted.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Protocol

from tokamac.engine.events import MemoryPressure
from tokamac.engine.metrics import Metrics, Throttle
from tokamac.engine.perf.diagnosis import (
    BEHIND,
    WORTH_S,
    WORTH_SHARE,
    Diagnosis,
    PartName,
    Remedy,
    RemedyName,
    Term,
    TimePart,
    Unit,
    Waits,
)
from tokamac.engine.perf.memory import giving_way

from . import units
from .units import UNKNOWN, count, percent, rate, seconds, wait

PLACE = re.compile(r"\{(\w+)\}")
"""Another term's key in a formula."""
BOUND: dict[Waits, str] = {
    "memory": "limited by memory bandwidth",
    "compute": "limited by arithmetic",
    "host": "limited by the processor, which prepares each step (Python, launching kernels)",
    "overhead": "limited by the overhead of each step, not by memory or arithmetic",
    "not memory": "not limited by memory",
}
READING_TPS = (4.0, 8.0)
"""Tokens a second: slower than the first, one waits for the text; faster than the second, not. 240 words a minute are about 5."""


def figures_text(metrics: Metrics) -> str:
    """Return the line below a reply: ``72 tok/s · 37 tokens · first token 0.06 s``; what is unknown is left out."""
    if metrics.ttft_s is None:
        return "no token was made"
    written = metrics.generated_tokens
    speed = "" if metrics.decode_tps is None else rate(metrics.decode_tps)
    tokens = f"{count(written)} token{'' if written == 1 else 's'}"
    return " · ".join(part for part in (speed, tokens, f"first token {wait(metrics.ttft_s)}") if part)


def remark(metrics: Metrics, diagnosis: Diagnosis | None) -> str:
    """Return what is worth saying below a reply: that it was held up, or waited for long; "" where all went as it should."""
    if metrics.total_s is None or diagnosis is None:
        return ""
    if diagnosis.throttles:
        return f"slowed down: {', '.join(BRIEF_THROTTLED[each] for each in diagnosis.throttles)}"
    part = diagnosis.slowest
    if is_held_up(part, metrics.total_s):
        return f"{percent(part.of_expected)} of the expected speed"
    if part.name == "wait" and part.seconds >= LONG_S:
        return f"waited {seconds(part.seconds)} before the prompt was read"
    if part.name == "prefill" and part.seconds >= LONG_S:
        return f"reading the prompt took {_of(part.seconds, metrics.total_s)}"
    return ""


LONG_S = 1.0
"""Seconds before the first token from which on a reader notices that they wait."""
BRIEF_THROTTLED: dict[Throttle, str] = {"thermal": "hot chip", "low power": "Low Power Mode"}


def is_held_up(part: TimePart, total_s: float | None) -> bool:
    """Whether a part was so much slower than expected that it is worth a word: not where it lost milliseconds."""
    if not part.behind or part.of_expected is None or total_s is None:
        return False
    return part.seconds * (1 - part.of_expected) >= max(WORTH_S, WORTH_SHARE * total_s)


def headline(metrics: Metrics, diagnosis: Diagnosis | None) -> tuple[str, ...]:
    """Return the verdict in short sentences, the plainest first: how the speed feels, what set it, what would help most."""
    if metrics.total_s is None or metrics.ttft_s is None:
        return ("No token was made.",)
    said = [_pace(metrics.decode_tps)]
    if diagnosis is not None:
        said += [
            together(metrics, diagnosis),
            _cause(metrics, diagnosis),
            *(tip(each) for each in diagnosis.remedies[:1]),
        ]
    return tuple(each for each in said if each) or (f"Took {seconds(metrics.total_s)}.",)


def _pace(tps: float | None) -> str:
    """Return how fast that is for a reader."""
    if tps is None:
        return ""
    slow, fast = READING_TPS
    if tps >= fast:
        return "Faster than most people read."
    return "About as fast as people read." if tps >= slow else "Slower than most people read."


def together(metrics: Metrics, diagnosis: Diagnosis) -> str:
    """Return how many replies were written at once, and what that cost this one; "" where it was alone."""
    if metrics.replies_at_once < 2:
        return ""
    alone = next((term.value for term in diagnosis.terms if term.key == "alone"), None)
    said = f"{metrics.replies_at_once} replies were written at once"
    return f"{said}." if alone is None else f"{said}; alone, about {rate(alone)} would be expected."


def _cause(metrics: Metrics, diagnosis: Diagnosis) -> str:
    """Return what set the speed of a reply, as far as it is known."""
    if diagnosis.throttles:
        return " ".join(f"{THROTTLED[each]}." for each in diagnosis.throttles)
    part = diagnosis.slowest
    if is_held_up(part, metrics.total_s):
        return f"{percent(part.of_expected)} of the expected speed: something else was using the machine."
    if part.name == "wait" and part.seconds >= LONG_S:
        return f"It waited {seconds(part.seconds)} before it read the prompt."
    if part.name == "prefill" and part.seconds >= LONG_S:
        return f"Reading the prompt took most of the time: {_of(part.seconds, metrics.total_s or part.seconds)}."
    decode = diagnosis.part("decode")
    if decode.bound != "host" and decode.of_expected is not None and decode.of_expected >= BEHIND:
        beyond = decode.of_expected > 1 / BEHIND
        return "Faster than expected here." if beyond else f"{percent(decode.of_expected)} of the speed expected here."
    reached = "" if decode.of_ceiling is None else f": {percent(decode.of_ceiling)} of the hardware limit"
    return "" if decode.bound is None else f"{BRIEFLY[decode.bound]}{reached}."


BRIEFLY: dict[Waits, str] = {
    "memory": "Limited by memory speed",
    "compute": "Limited by arithmetic",
    "host": "Limited by the processor that prepares each step",
    "overhead": "Limited by the overhead of each step",
    "not memory": "Not limited by memory",
}


def tip(remedy: Remedy) -> str:
    """Return a change in one short sentence; "" for one that the verdict has said already."""
    saves = f"would save {seconds(remedy.gain_s)}."
    match remedy.name:
        case "packed keys and values":
            return f"{remedy.to}-bit keys and values {saves}"
        case "packed weights":
            return f"{remedy.to}-bit weights {saves}"
        case "shorter context":
            return f"Half the prompt {saves}"
        case "prompt cache":
            return f"The prompt cache {saves}"
        case "quiet machine" | "full power" | "cool chip":
            return ""


def _of(part_s: float, whole_s: float) -> str:
    """Return ``3.6 of 4.1 s``, or ``99 ms of 4.1 s`` where the units differ."""
    part, whole = seconds(part_s), seconds(whole_s)
    amount, unit = part.split(" ", maxsplit=1)
    return f"{amount if whole.split(' ')[1:] == [unit] else part} of {whole}"


def sentence(metrics: Metrics, diagnosis: Diagnosis | None) -> str:
    """Return in a few sentences what of a reply took the time, what limited that, how fast it is here, and what helps most."""
    if metrics.total_s is None or metrics.ttft_s is None:
        return "No token was made."
    whole = f"Took {seconds(metrics.total_s)}"
    if diagnosis is None:
        return f"{whole}, {seconds(metrics.ttft_s)} of it before the first token."
    said = [f"{whole}: {_took(diagnosis.slowest, metrics)}.", *(f"{THROTTLED[each]}." for each in diagnosis.throttles)]
    if beside := together(metrics, diagnosis):
        said.append(beside)
    if guessed := guesses_text(metrics):
        said.append(guessed)
    if diagnosis.remedies:
        said.append(_would_help(diagnosis.remedies[0], metrics.total_s))
    elif metrics.cached_tokens and diagnosis.slowest.name == "decode":
        cached = f"{count(metrics.cached_tokens)} of {count(metrics.prompt_tokens)} prompt tokens"
        said.append(f"{cached} came from the prompt cache.")
    return " ".join(said)


def guesses_text(metrics: Metrics) -> str:
    """Return how many guessed tokens came true, and what that was worth, as a sentence; "" where none was guessed."""
    if not metrics.drafted_tokens:
        return ""
    said = f"{count(metrics.accepted_tokens)} of {count(metrics.drafted_tokens)} guessed tokens came true"
    saved_s = metrics.saved_s or 0.0
    if saved_s > 0:
        return f"{said}, which saved {seconds(saved_s)}."
    return f"{said}, which took {seconds(-saved_s)} longer." if saved_s < 0 else f"{said}."


def _would_help(remedy: Remedy, total_s: float) -> str:
    """Return a change as a sentence of its own: what it is, and what it is predicted to bring."""
    match remedy.name:
        case "quiet machine":
            alone = seconds(max(total_s - remedy.gain_s, 0.0))
            return f"Something else was using the machine; alone it would have taken {alone}."
        case "full power" | "cool chip":
            return f"At full speed it would have taken {seconds(max(total_s - remedy.gain_s, 0.0))}."
    return f"What would help: {remedy_text(remedy)}."


def _took(part: TimePart, metrics: Metrics) -> str:
    time = seconds(part.seconds)
    if part.name == "wait":
        return f"{time} went by before the prompt was read"
    verb, noun, number = "reading", "prompt token", metrics.prefill_tokens
    if part.name == "decode":
        verb, noun, number = "writing", "token", metrics.generated_tokens
    bound = "" if part.bound is None else BOUND[part.bound]
    how = "; ".join(each for each in (bound, reached_text(part)) if each)
    tokens = f"{count(number)} {noun}{'' if number == 1 else 's'}"
    return f"{time} {verb} {tokens} ({part.name}{f', {how}' if how else ''})"


def reached_text(part: TimePart) -> str:
    """Return how near a phase came to what the machine allows, and to what is expected there; empty where neither is known."""
    said = [] if part.of_ceiling is None else [f"{percent(part.of_ceiling)} of the hardware limit"]
    if part.of_expected is not None:
        only = "only " if part.behind and part.of_expected >= 0.01 else ""
        said.append(f"{only}{percent(part.of_expected)} of the expected speed")
    return " and ".join(said)


def remedy_text(remedy: Remedy) -> str:
    """Return a change and what it is predicted to bring: ``4-bit weights: decode from 12.0 to 31.0 tok/s, saves 8.1 s``."""
    parts = ["", "", f"saves {seconds(remedy.gain_s)}"]
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
            name = "the prompt cache, once it has read this prompt"
            parts[2] += " before the first token"
        case "quiet machine":
            name = "nothing else running"
        case "full power":
            name = "Low Power Mode off, nothing else running"
        case "cool chip":
            name = "a cool chip, nothing else running"
    return f"{name}: {', '.join(part for part in parts if part)}"


HOW: dict[RemedyName, str] = {
    "packed keys and values": "--kv-bits 8; in the chat /settings",
    "packed weights": "tokamac convert MODEL --bits 4",
    "shorter context": "a shorter prompt, a new chat, or --kv-window",
    "prompt cache": "leave out --no-prompt-cache",
    "quiet machine": "close other busy programs, and let the machine cool down",
    "full power": "System Settings > Battery (Energy on a desktop Mac)",
    "cool chip": "let the machine cool down, and close other busy programs",
}
"""How each change is made."""

THROTTLED: dict[Throttle, str] = {
    "thermal": "macOS slowed the chip down because it was hot",
    "low power": "Low Power Mode was on, which slows the chip down",
}
RELIEF: dict[Throttle, RemedyName] = {"thermal": "cool chip", "low power": "full power"}
"""What ends it."""
DOING: dict[PartName, str] = {
    "wait": "waiting before the prompt was read: the queue, tokenizing, loading the prompt cache",
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
        case "replies":
            return f"{value:,.1f}"
        case "tokens":
            return f"{value:,.0f} tokens"
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
    done = ["part of the prompt did not fit and is computed again"] if event.failed else []
    if event.pool_bytes:
        done.append(f"{units.size(event.pool_bytes)} of unused buffers were freed")
    if event.fused_bytes:
        done.append(f"attention runs fused, which is slower and saves {units.size(event.fused_bytes)}")
    if event.chunk is not None:
        done.append(f"the prompt is read {units.count(event.chunk)} tokens at a time")
    if event.cache_bytes:
        done.append(f"{units.size(event.cache_bytes)} of earlier prompts were dropped from memory")
    if event.from_others:
        done.append(giving_way(event.from_others))
    if event.ended:
        done.append("the reply ends here because more of it would not fit")
    if event.waits:
        done.append("this reply waits until another one is over")
    needed = units.size(event.predicted_bytes)
    of = needed if event.budget_bytes is None else f"{needed} of {units.size(event.budget_bytes)}"
    expected = f"that would take {of}" if event.ended or event.waits else f"{of} will be used"
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
        positions = f"{100 * found.top1:.1f} % of {count(found.positions)} positions"
        said.append(f"picks the same next token as the original in {positions}")
    if found is not None and found.perplexity_ratio is not None:
        more = 100 * (found.perplexity_ratio - 1)
        by = f"{abs(more):.1f} % {'higher' if more > 0 else 'lower'}" if abs(more) >= 0.05 else "the same"
        said.append(f"perplexity is {by}")
    if found is not None and found.kl is not None:
        spread = "" if found.kl_se is None else f" ± {found.kl_se:.2g}"
        said.append(f"KL divergence {found.kl:.3g}{spread} nats a token")
    if relative_error is not None:
        said.append(f"relative error of the weights {100 * relative_error:.2g} %")
    return "; ".join(said) or UNKNOWN
