"""A reply's diagnosis in words, for the chat and for the command line: one line, or one sentence. No rate is computed here.

Of what is unknown nothing is said, and nothing is promised that was not predicted.
"""

from tokamac.app.tui.units import count, percent, rate, seconds
from tokamac.engine.limits.diagnosis import Diagnosis, Part, Waits
from tokamac.engine.limits.gaps import Throttle
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.limits.remedies import Remedy, RemedyName

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


def _took(part: Part, metrics: Metrics) -> str:
    time = seconds(part.seconds)
    if part.name == "wait":
        return f"{time} went by before the prompt was read"
    doing = f"reading {_tokens(metrics.prefill_tokens, 'prompt token')}"
    if part.name == "decode":
        doing = f"writing {_tokens(metrics.generated_tokens, 'token')}"
    return f"{time} {doing} ({part.name}{_how(part)})"


def _tokens(number: int, noun: str) -> str:
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def _how(part: Part) -> str:
    """Return what a phase waited for and how near it came to what is possible, as far as that is known."""
    said = [] if part.bound is None else [BOUND[part.bound]]
    if reached := reached_text(part):
        said.append(reached)
    return "".join(f", {each}" for each in said[:1]) + "".join(f": {each}" for each in said[1:])


def reached_text(part: Part) -> str:
    """Return how near a phase came to what the machine allows, and to what is expected there; empty where neither is known."""
    allowed = "" if part.of_ceiling is None else f"{percent(part.of_ceiling)} of what this machine allows"
    expected = "" if part.of_expected is None else f"{_only(part)}{percent(part.of_expected)} of what is expected"
    return " and ".join(each for each in (allowed, expected) if each)


def _only(part: Part) -> str:
    few = part.of_expected is not None and part.of_expected < 0.01
    return "only " if part.behind and not few else ""


def remedy_text(remedy: Remedy) -> str:
    """Return a change and what it is predicted to bring: ``4-bit weights: decode from 12.0 to 31.0 tok/s, 8.1 s less``."""
    parts = [_prefill(remedy), _rates(remedy), f"{seconds(remedy.gain_s)} less"]
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


def _prefill(remedy: Remedy) -> str:
    if remedy.before_s is None or remedy.after_s is None:
        return ""
    return f"prefill from {seconds(remedy.before_s)} to {seconds(remedy.after_s)}"


def _rates(remedy: Remedy) -> str:
    if remedy.before_tps is None or remedy.after_tps is None:
        return ""
    return f"decode from {rate(remedy.before_tps).partition(' ')[0]} to {rate(remedy.after_tps)}"


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
