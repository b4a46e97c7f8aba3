"""Measurements in words: a reply's diagnosis, memory pressure, conversion quality."""

# Shared by chat and command line: a line, a sentence, or everything with formulas and values. No figure is computed here;
# unknown ones are omitted, and only predicted gains are promised.

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokamac.engine.events import MemoryPressure
from tokamac.engine.metrics import Metrics, Slowing, is_shown
from tokamac.engine.perf.diagnosis import (
    BEHIND,
    NEAR,
    RELIEF,
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

from ..text import units
from ..text.sanitise import sanitise_line
from ..text.units import UNKNOWN, count, milliseconds, percent, rate, seconds, wait

PLACE = re.compile(r"\{(\w+)\}")  # another term's key in a formula
BOUND: dict[Waits, str] = {
    "memory": "limited by memory bandwidth",
    "compute": "limited by arithmetic",
    "host": "limited by the processor, which prepares each step (Python, launching kernels)",
    "overhead": "limited by the overhead of each step, not by memory or arithmetic",
    "not memory": "not limited by memory",
}
# Tokens a second: slower than the first, one waits for the text; faster than the second, not. 240 words a minute are
# about 5.
READING_TPS = (4.0, 8.0)


def figures_text(metrics: Metrics) -> str:
    """Return the line below a reply: ``72 tok/s · 370 tokens · first token 0.06 s``.

    Too short for a rate: ``37 tokens in 0.5 s · first token 0.06 s``.
    """
    if metrics.ttft_s is None:
        return "no token was made"
    tokens = "" if metrics.shown_decode_tps is None else f" · {_tokens(metrics)}"
    return f"{speed_text(metrics)}{tokens} · first token {wait(metrics.ttft_s)}"


def speed_text(metrics: Metrics) -> str:
    """``72 tok/s``, or ``37 tokens in 0.5 s`` if too short for a rate."""
    if metrics.shown_decode_tps is not None:
        return rate(metrics.shown_decode_tps)
    return _tokens(metrics) + ("" if metrics.decode_s is None else f" in {seconds(metrics.decode_s)}")


def _tokens(metrics: Metrics) -> str:
    return f"{count(metrics.generated_tokens)} token{'' if metrics.generated_tokens == 1 else 's'}"


def prompt_text(metrics: Metrics) -> str:
    """``2,048 tokens, 1,024 of them cached; read in 1.2 s at 853 tok/s``."""
    cached = f", {count(metrics.cached_tokens)} of them cached" if metrics.cached_tokens else ""
    tps = metrics.shown_prefill_tps
    read = "" if metrics.prefill_s is None else f"; read in {seconds(metrics.prefill_s)}"
    seen = "" if metrics.image_s is None else f"; pictures seen in {seconds(metrics.image_s)}"
    return f"{count(metrics.prompt_tokens)} tokens{cached}{seen}{read}{'' if tps is None else f' at {rate(tps)}'}"


def pace_text(metrics: Metrics) -> str:
    """``median 16 ms, slowest 5 % above 24 ms``, or "" if unknown."""
    # Also "" with accepted draft tokens: there is no time between the tokens of one pass.
    gaps = metrics.itl_ms
    if gaps is None or metrics.accepted_tokens:
        return ""
    return f"median {milliseconds(gaps.p50)}, slowest 5 % above {milliseconds(gaps.p95)}"


def limit_text(metrics: Metrics) -> str:
    """``159 tok/s at most here``, the memory bandwidth's limit."""
    if metrics.ceiling_tps is None:
        return "speed limit of this machine: not measured yet"
    return f"{rate(metrics.ceiling_tps)} at most here{' without guesses' if metrics.drafted_tokens else ''}"


def time_text(diagnosis: Diagnosis) -> str:
    """``start 2.1 s + load 3.0 s + wait 8 ms + prefill 0.4 s + decode 3.6 s = 9.1 s``."""
    parts = " + ".join(f"{part.name} {seconds(part.seconds)}" for part in diagnosis.parts)
    return f"{parts} = {seconds(diagnosis.total_s)}"


def remark(metrics: Metrics, diagnosis: Diagnosis | None) -> str:
    """Return a remark on delays or long waits; "" if all went well."""
    if metrics.total_s is None or diagnosis is None:
        return ""
    if diagnosis.throttles:
        return f"slowed down: {', '.join(BRIEF_THROTTLED[each] for each in diagnosis.throttles)}"
    part = diagnosis.slowest
    if is_held_up(part, metrics.total_s):
        return f"{percent(part.of_expected)} of the expected speed"
    if part.name == "wait" and part.seconds >= LONG_S:
        return f"waited {seconds(part.seconds)} before the prompt was read"
    if part.name in ("load", "image", "prefill") and part.seconds >= LONG_S:
        return f"{DOING[part.name]} took {_of(part.seconds, diagnosis.total_s)}"
    return ""


LONG_S = 1.0  # seconds before the first token from which on a reader notices that they wait
BRIEF_THROTTLED: dict[Slowing, str] = {"thermal": "hot chip", "low power": "Low Power Mode", "pace": "--pace"}


def is_held_up(part: TimePart, total_s: float | None) -> bool:
    """Whether a part was noticeably slower than expected, beyond milliseconds."""
    if not part.behind or part.of_expected is None or total_s is None:
        return False
    return part.seconds * (1 - part.of_expected) >= max(WORTH_S, WORTH_SHARE * total_s)


def headline(metrics: Metrics, diagnosis: Diagnosis | None) -> tuple[str, ...]:
    """Return a verdict in short sentences: how the speed feels, its cause, what helps most."""
    if metrics.total_s is None or metrics.ttft_s is None:
        return ("No token was made.",)
    said = [_pace(metrics.decode_tps)]
    if diagnosis is not None:
        said += [
            together(metrics, diagnosis),
            _cause(metrics, diagnosis) or guesses_text(metrics),
            *(tip(each) for each in diagnosis.remedies[:1]),
        ]
    return tuple(each for each in said if each) or (f"Took {seconds(metrics.total_s)}.",)


def _pace(tps: float | None) -> str:
    if tps is None:
        return ""
    slow, fast = READING_TPS
    if tps >= fast:
        return "Faster than most people read."
    return "About as fast as people read." if tps >= slow else "Slower than most people read."


def together(metrics: Metrics, diagnosis: Diagnosis) -> str:
    """Describe parallel replies and their cost to this one; "" if alone."""
    if metrics.replies_at_once < 2:
        return ""
    alone = next((term.value for term in diagnosis.terms if term.key == "alone"), None)
    said = f"{metrics.replies_at_once} replies were written at once"
    return f"{said}." if alone is None else f"{said}; alone, about {rate(alone)} would be expected."


def _cause(metrics: Metrics, diagnosis: Diagnosis) -> str:
    if diagnosis.throttles:
        return " ".join(f"{THROTTLED[each]}." for each in diagnosis.throttles)
    part = diagnosis.slowest
    if is_held_up(part, metrics.total_s):
        return f"{percent(part.of_expected)} of the expected speed: something else was using the machine."
    if part.name == "wait" and part.seconds >= LONG_S:
        return f"It waited {seconds(part.seconds)} before it read the prompt."
    if part.name in ("load", "image", "prefill") and part.seconds >= LONG_S:
        doing = DOING[part.name].capitalize()
        return f"{doing} took most of the time: {_of(part.seconds, diagnosis.total_s)}."
    decode = diagnosis.part("decode")
    if decode.bound != "host" and decode.of_expected is not None and decode.of_expected >= BEHIND:
        beyond = decode.of_expected > 1 / BEHIND
        return "Faster than expected here." if beyond else f"{percent(decode.of_expected)} of the speed expected here."
    said = (_bound(decode, BRIEFLY), _of_limit(decode))
    return "" if decode.bound is None else f"{': '.join(filter(None, said))}.".capitalize()


BRIEFLY: dict[Waits, str] = {
    "memory": "limited by memory speed",
    "compute": "limited by arithmetic",
    "host": "limited by the processor that prepares each step",
    "overhead": "limited by the overhead of each step",
    "not memory": "not limited by memory",
}


def _bound(part: TimePart, words: dict[Waits, str]) -> str:
    """Return a phase's bottleneck; "" if it reached less than half of that limit."""
    far = part.bound in ("memory", "compute") and part.of_ceiling is not None and part.of_ceiling < NEAR
    return "" if part.bound is None or far else words[part.bound]


def _of_limit(part: TimePart) -> str:
    if part.of_ceiling is None:
        return ""
    limit = "what this processor can do" if part.bound == "compute" else "the hardware limit"
    return f"{percent(part.of_ceiling)} of {limit}"


def tip(remedy: Remedy) -> str:
    """Return a remedy in a short sentence; "" if the verdict covers it."""
    return REMEDIES[remedy.name].tip.format(to=count(remedy.to), gain=seconds(remedy.gain_s))


def _of(part_s: float, whole_s: float) -> str:
    """``3.6 of 4.1 s``, or ``99 ms of 4.1 s`` with different units."""
    part, whole = seconds(part_s), seconds(whole_s)
    amount, unit = part.split(" ", maxsplit=1)
    return f"{amount if whole.split(' ')[1:] == [unit] else part} of {whole}"


def sentence(metrics: Metrics, diagnosis: Diagnosis | None) -> str:
    """Summarize a reply's time, its bottleneck, the share of the limit and the best remedy."""
    if metrics.total_s is None or metrics.ttft_s is None:
        return "No token was made."
    whole = f"Took {seconds(metrics.total_s if diagnosis is None else diagnosis.total_s)}"
    if diagnosis is None:
        return f"{whole}, {seconds(metrics.ttft_s)} of it before the first token."
    said = [f"{whole}: {_took(diagnosis.slowest, metrics)}.", *(f"{THROTTLED[each]}." for each in diagnosis.throttles)]
    if beside := together(metrics, diagnosis):
        said.append(beside)
    if guessed := guesses_text(metrics):
        said.append(guessed)
    if diagnosis.remedies:
        said.append(_would_help(diagnosis.remedies[0], diagnosis.total_s))
    elif metrics.cached_tokens and diagnosis.slowest.name == "decode":
        cached = f"{count(metrics.cached_tokens)} of {count(metrics.prompt_tokens)} prompt tokens"
        said.append(f"{cached} came from the prompt cache.")
    return " ".join(said)


def guesses_text(metrics: Metrics) -> str:
    """Describe accepted draft tokens and their gain; "" without any drafts."""
    if not metrics.drafted_tokens:
        return ""
    said = f"{count(metrics.accepted_tokens)} of {count(metrics.drafted_tokens)} guessed tokens came true"
    saved_s = metrics.saved_s or 0.0
    if saved_s > 0:
        return f"{said}, which saved {seconds(saved_s)}."
    return f"{said}, which took {seconds(-saved_s)} longer." if saved_s < 0 else f"{said}."


def _would_help(remedy: Remedy, total_s: float) -> str:
    match remedy.name:
        case "quiet machine":
            alone = seconds(max(total_s - remedy.gain_s, 0.0))
            return f"Something else was using the machine; alone it would have taken {alone}."
        case "full power" | "full pace" | "cool chip":
            return f"At full speed it would have taken {seconds(max(total_s - remedy.gain_s, 0.0))}."
    return f"What would help: {remedy_text(remedy)}."


def _took(part: TimePart, metrics: Metrics) -> str:
    time = seconds(part.seconds)
    if part.name == "wait":
        return f"{time} went by before the prompt was read"
    if part.name in ("start", "load"):
        return f"{time} {DOING[part.name]}"
    verb, noun, number = "reading", "prompt token", metrics.prefill_tokens
    if part.name == "decode":
        verb, noun, number = "writing", "token", metrics.generated_tokens
    how = "; ".join(each for each in (_bound(part, BOUND), reached_text(part)) if each)
    tokens = f"{count(number)} {noun}{'' if number == 1 else 's'}"
    return f"{time} {verb} {tokens} ({part.name}{f', {how}' if how else ''})"


def reached_text(part: TimePart) -> str:
    """Compare a phase with the machine's limit and the expected rate; "" if unknown."""
    said = [_of_limit(part)] if part.of_ceiling is not None else []
    if part.of_expected is not None:
        only = "only " if part.behind and part.of_expected >= 0.01 else ""
        said.append(f"{only}{percent(part.of_expected)} of the expected speed")
    return " and ".join(said)


def remedy_text(remedy: Remedy) -> str:
    """``4-bit weights: decode from 12.0 to 31.0 tok/s, saves 8.1 s``."""
    parts = ["", "", f"saves {seconds(remedy.gain_s)}"]
    if remedy.before_s is not None and remedy.after_s is not None:
        parts[0] = f"prefill from {seconds(remedy.before_s)} to {seconds(remedy.after_s)}"
    if remedy.before_tps is not None and remedy.after_tps is not None:
        parts[1] = f"decode from {rate(remedy.before_tps).partition(' ')[0]} to {rate(remedy.after_tps)}"
    words = REMEDIES[remedy.name]
    parts[1] += words.of_decode if parts[1] else ""
    parts[2] += words.of_gain
    name = words.name.format(to=count(remedy.to))
    return f"{name}: {', '.join(part for part in parts if part)}"


@dataclass(frozen=True, slots=True)
class RemedyWords:
    """A remedy, where {to} is what it changes to and {gain} the time saved. how: where it is done. of_: after a figure."""

    name: str
    tip: str
    how: str
    of_decode: str = ""
    of_gain: str = ""


REMEDIES: dict[RemedyName, RemedyWords] = {
    "packed keys and values": RemedyWords(
        "{to}-bit keys and values", "{to}-bit keys and values would save {gain}.", "--kv-bits 8; in the chat /settings",
        of_decode=" at this context",
    ),
    "packed weights": RemedyWords(
        "{to}-bit weights", "{to}-bit weights would save {gain}.", "tokamac convert MODEL --bits 4"
    ),
    "shorter context": RemedyWords(
        "half the prompt ({to} tokens)", "Half the prompt would save {gain}.", "a shorter prompt, a new chat, or --kv-window"
    ),
    "prompt cache": RemedyWords(
        "the prompt cache, once it has read this prompt", "The prompt cache would save {gain}.",
        "leave out --no-prompt-cache", of_gain=" before the first token",
    ),
    "quiet machine": RemedyWords(
        "nothing else running", "", "close other busy programs, and let the machine cool down"
    ),
    "full power": RemedyWords(
        "Low Power Mode off, nothing else running", "", "System Settings > Battery (Energy on a desktop Mac)"
    ),
    "full pace": RemedyWords("the whole time of the GPU", "", "/pace 100; pace in the settings"),
    "cool chip": RemedyWords(
        "a cool chip, nothing else running", "", "let the machine cool down, and close other busy programs"
    ),
    "no guesses": RemedyWords(
        "no guesses, too few of which came true", "Without guesses it would have been {gain} faster.",
        "--speculation off; in the chat /settings",
    ),
}  # fmt: skip

NOTHING_HELPS = "No setting would make this noticeably faster."


def help_text(metrics: Metrics, ending: str) -> str:
    """Return advice for a reply without a predicted remedy, or "". ending: why it ended."""
    # A looping, cut or stopped reply, or one slowed by drafts, doesn't prove that nothing would have helped.
    if ending == "loop":
        return "It repeated itself. Make it again, or raise the repetition penalty (/settings)."
    paid = metrics.saved_s is None or metrics.saved_s > 0
    return NOTHING_HELPS if paid and ending in ("stop", "tool_calls") else ""


THROTTLED: dict[Slowing, str] = {
    "thermal": "macOS slowed the chip down because it was hot",
    "low power": "Low Power Mode was on, which slows the chip down",
    "pace": "The model rested between steps, as you asked",
}
DOING: dict[PartName, str] = {
    "start": "starting the program",
    "load": "loading the model",
    "wait": "waiting before the prompt was read: the queue, tokenizing, loading the prompt cache",
    "image": "seeing pictures",
    "prefill": "reading the prompt",
    "decode": "writing the reply",
}


def value_text(value: float | None, unit: Unit) -> str:
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


def known_terms(diagnosis: Diagnosis) -> list[Term]:
    """Return terms worth showing, and the bandwidth even if unknown (it says why)."""
    values = {term.key: term.value or 0.0 for term in diagnosis.terms}
    writing_s = values.get("writing", 0.0)
    hidden = () if is_shown(round(values.get("rate", 0.0) * writing_s) + 1, writing_s) else ("rate", "achieved")
    return [
        term
        for term in diagnosis.terms
        if term.key == "bandwidth" or (term.value is not None and term.key not in hidden)
    ]


def words(term: Term, terms: Sequence[Term]) -> str:
    names = {each.key: each.name for each in terms}
    return PLACE.sub(lambda found: names.get(found[1], found[0]), term.formula)


def numbers(term: Term, terms: Sequence[Term]) -> str:
    """Return a term's formula with values; "" if it has none or one is unknown."""
    if term.value is None:
        return ""
    values = {each.key: value_text(each.value, each.unit) for each in terms}
    return PLACE.sub(lambda found: values.get(found[1], found[0]), term.formula) if PLACE.search(term.formula) else ""


def part_text(part: TimePart) -> str:
    said = [DOING[part.name], _bound(part, BOUND), reached_text(part)]
    return "; ".join(each for each in said if each)


def lines(diagnosis: Diagnosis) -> Iterator[str]:
    for part in diagnosis.parts:
        yield f"{part.name:<9} {units.seconds(part.seconds)}: {part_text(part)}"
    for term in known_terms(diagnosis):
        yield f"{term.concern:<9} {_equation(term, diagnosis.terms)}"
    for throttle in diagnosis.throttles:
        yield f"machine   {THROTTLED[throttle]} ({REMEDIES[RELIEF[throttle]].how})"
    for remedy in diagnosis.remedies:
        yield f"remedy    {remedy_text(remedy)} ({REMEDIES[remedy.name].how})"


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
    """Describe a memory pressure event: action, cost to other programs, expected memory and budget."""
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
    """Comparison of two models on a text (figures: quant/report.py); None is unknown."""

    @property
    def kl(self) -> float | None:
        """Nats per token."""

    @property
    def kl_se(self) -> float | None:
        """Standard error of ``kl``."""

    @property
    def top1(self) -> float | None:
        """Share of positions, 0 to 1."""

    @property
    def perplexity_ratio(self) -> float | None:
        """Result ÷ source."""

    @property
    def positions(self) -> int | None:
        """Positions compared."""


def poor_quality(folder: Path) -> str:
    """Return a sentence with a remedy if a conversion clearly degraded the model, else ""."""
    from tokamac.quant.report import read_recorded

    recorded = read_recorded(folder)
    return "" if isinstance(recorded, str) else recorded.advice


def closeness(found: ModelComparison | None, relative_error: float | None, grade: str) -> str:
    """Describe top-1 agreement, perplexity, KL divergence and weight error."""
    said = [grade] if grade else []
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


def changed_text(changed: Sequence[str]) -> list[str]:
    """Return lines on where a conversion's next word is another than its source's; none where no such place is known."""
    return ["where the next word changed:", *(f"  {sanitise_line(each)}" for each in changed)] if changed else []
