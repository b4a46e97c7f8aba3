"""The arithmetic behind a verdict, number by number: each term says how it is computed from those before it.

A formula names other terms in braces, ``{bandwidth} ÷ {step}``. Whoever shows it puts their names there, or their values.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from tokamac.engine.limits.fitted import Fitted, peak_tflops
from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.host import Host, HostLimited, calls_of
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.limits.prediction import Pace
from tokamac.engine.limits.roofline import ridge_point
from tokamac.engine.limits.situation import Foretold
from tokamac.engine.limits.work import Work

Unit = Literal["GB/s", "TFLOP/s", "bytes", "s", "tok/s", "FLOP", "FLOP/byte"]
Concern = Literal["machine", "decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Term:
    """One number. key: what formulas call it. value: in ``unit``; None is unknown."""

    key: str
    concern: Concern
    name: str
    formula: str
    value: float | None
    unit: Unit


def terms_of(metrics: Metrics, work: Work, chip: Chip, pace: Pace | None, foretold: Foretold) -> tuple[Term, ...]:
    """Return the numbers of a reply, each after those it is computed from."""
    return (
        *_machine(work, chip, pace, foretold),
        *_decode(metrics, work, pace, foretold),
        *_prefill(metrics, work, pace, foretold),
    )


def _machine(work: Work, chip: Chip, pace: Pace | None, foretold: Foretold) -> tuple[Term, ...]:
    source = {"table": "its maker's figure", "measured": "measured on this machine", "unknown": "not known"}[
        chip.source
    ]
    bandwidth = f"{source} for another bin" if chip.other_bin else source
    peak, kind = peak_tflops(chip), "half precision" if chip.source == "table" else source
    ridge = None if peak is None or chip.bandwidth_gbs is None else ridge_point(chip.bandwidth_gbs, peak)
    found: tuple[Term, ...] = (
        Term("bandwidth", "machine", "bandwidth", f"{chip.name}, {bandwidth}", chip.bandwidth_gbs, "GB/s"),
        Term("peak", "machine", "peak arithmetic", f"{chip.name}, {kind}", peak, "TFLOP/s"),
        Term("ridge", "machine", "ridge point", "{peak} ÷ {bandwidth}", ridge, "FLOP/byte"),
    )
    if (kernels := _fitted(pace)) is None:
        return found
    idle = _launching_s(work, kernels, foretold)
    found = (*found, Term("launching", "machine", "launching kernels", f"{work.launches:,} kernels a step", idle, "s"))
    if (host := _host(pace)) is None:
        return found
    return (
        *found,
        Term("host", "machine", "host", "a step is built in Python: timed on this machine", host.step_s, "s"),
        Term("wait", "machine", "round trip", "to the device and back: timed on this machine", host.wait_s, "s"),
    )


def _decode(metrics: Metrics, work: Work, pace: Pace | None, foretold: Foretold) -> tuple[Term, ...]:
    step, m = foretold.decode, metrics
    between = None if m.total_s is None or m.ttft_s is None else m.total_s - m.ttft_s
    held = f"those of {foretold.context:,} tokens, the middle of the reply"
    return (
        *_weights(work),
        Term("kv", "decode", "keys and values", held, work.kv_bytes(foretold.context), "bytes"),
        Term("step", "decode", "bytes a step", "{weights} + {kv}", step.bytes_read, "bytes"),
        Term("ceiling", "decode", "ceiling", "{bandwidth} ÷ {step}", m.ceiling_tps, "tok/s"),
        Term("expected", "decode", "expected", _expected_step(work, pace, foretold), m.expected_tps, "tok/s"),
        Term("writing", "decode", "time", "last token − first token", between, "s"),
        Term("rate", "decode", "measured", f"({m.generated_tokens:,} − 1) ÷ {{writing}}", m.decode_tps, "tok/s"),
        Term("achieved", "decode", "achieved", "{step} × {rate}", m.achieved_gbs, "GB/s"),
    )


def _weights(work: Work) -> tuple[Term, ...]:
    """Return what a step reads of the weights: of a mixture, its two parts first."""
    whole = work.weight_bytes()
    if not work.expert_bytes:
        return (Term("weights", "decode", "weights", "all that a step reads", whole, "bytes"),)
    active = None if whole is None else whole - work.shared_bytes
    return (
        Term("shared", "decode", "shared weights", "all that every step reads", work.shared_bytes, "bytes"),
        Term("experts", "decode", "active experts", f"of {work.expert_bytes / 1e9:,.1f} GB", active, "bytes"),
        Term("weights", "decode", "weights", "{shared} + {experts}", whole, "bytes"),
    )


def _prefill(metrics: Metrics, work: Work, pace: Pace | None, foretold: Foretold) -> tuple[Term, ...]:
    phase, m = foretold.prefill, metrics
    after = f", after {m.cached_tokens:,} cached" if m.cached_tokens else ""
    operations = f"2 × active parameters × {phase.tokens:,} tokens + attention{after}"
    # Of an unknown peak, what reading the bytes takes is known: a bound, but not the one that a long prompt meets.
    least = phase.ceiling_s if phase.bound is not None else None
    chunk = work.weight_bytes(min(phase.tokens, foretold.chunk))
    touched = Term("chunk", "prefill", "weights of a chunk", "with all experts that its tokens use", chunk, "bytes")
    weights = "the weights that its tokens use" if work.expert_bytes else "{weights}"
    return (
        *((touched,) if work.expert_bytes else ()),
        Term("operations", "prefill", "operations", operations, phase.operations, "FLOP"),
        Term(
            "held",
            "prefill",
            "keys and values",
            f"those of {m.prompt_tokens:,} tokens",
            work.kv_bytes(m.prompt_tokens),
            "bytes",
        ),
        Term("read", "prefill", "bytes", f"{weights} + {{held}}", phase.bytes_read, "bytes"),
        Term("intensity", "prefill", "intensity", "{operations} ÷ {read}", phase.intensity, "FLOP/byte"),
        Term("least", "prefill", "at least", "max({operations} ÷ {peak}, {read} ÷ {bandwidth})", least, "s"),
        Term("wanted", "prefill", "expected", _expected_prompt(work, pace, foretold), phase.expected_s, "s"),
        Term("reading", "prefill", "measured", "prefill begins → first token", m.prefill_s, "s"),
    )


TIMED = "the sum of its parts, each timed on this machine"
UNTIMED = "not known for this machine"


def _expected_step(work: Work, pace: Pace | None, foretold: Foretold) -> str:
    """Return the reading of weights, attention as the share of the bandwidth that it reaches here, and the launches."""
    if (kernels := _fitted(pace)) is None:
        return UNTIMED if pace is None else TIMED
    bandwidth, held = kernels.chip.bandwidth_gbs, work.kv_bytes(foretold.context)
    device = f"{{weights}} ÷ ({kernels.constants.shared:.1%} × {{bandwidth}})"
    if held and bandwidth:
        reached = held / (bandwidth * 1e9) / kernels.attention_s(work, foretold.context, bandwidth)
        device += f" + {{kv}} ÷ ({reached:.1%} × {{bandwidth}})"
    device += " + {launching}"
    return f"1 ÷ max({{host}}, {device})" if _host(pace) is not None else f"1 ÷ ({device})"


def _expected_prompt(work: Work, pace: Pace | None, foretold: Foretold) -> str:
    """Return the larger roof as kernels reach it, and the launches. All that fitted.py knows of kernels is one share here."""
    if (kernels := _fitted(pace)) is None:
        return UNTIMED if pace is None else TIMED
    phase, peak, bandwidth = foretold.prefill, peak_tflops(kernels.chip), kernels.chip.bandwidth_gbs
    calls, host = calls_of(phase.tokens, foretold.chunk), _host(pace)
    if phase.by_host:
        return f"{calls} × ({{host}} + {{wait}})"
    if phase.expected_s is None or phase.operations is None or not peak or not bandwidth:
        return UNTIMED
    chunks = math.ceil(phase.tokens / foretold.chunk)
    launched = chunks * (_launching_s(work, kernels, foretold) or 0.0)
    waited = 0.0 if host is None else calls * host.wait_s
    waits = "" if host is None else f" + {calls} × {{wait}}"
    reached = phase.operations / (peak * 1e12) / (phase.expected_s - launched - waited)
    weights, share = work.weight_bytes(min(phase.tokens, foretold.chunk)) or 0, kernels.constants.shared
    reading_s = chunks * weights / (share * bandwidth * 1e9)
    if math.isclose(reading_s + launched + waited, phase.expected_s, rel_tol=1e-6):
        read = "{chunk}" if work.expert_bytes else "{weights}"
        return f"{chunks} × {read} ÷ ({share:.1%} × {{bandwidth}}) + {chunks} × {{launching}}{waits}"
    return f"{{operations}} ÷ ({reached:.1%} × {{peak}}) + {chunks} × {{launching}}{waits}"


def _fitted(pace: Pace | None) -> Fitted | None:
    return pace.device if isinstance(pace, HostLimited) else pace if isinstance(pace, Fitted) else None


def _host(pace: Pace | None) -> Host | None:
    return pace.host if isinstance(pace, HostLimited) else None


def _launching_s(work: Work, pace: Fitted, foretold: Foretold) -> float | None:
    """Return what launching a step's kernels takes: what is left of a step that reads nothing."""
    return pace.decode_s(replace(work, shared_bytes=0, expert_bytes=0, kv=()), foretold.context)
