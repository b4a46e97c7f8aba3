"""What ``tokamac bench`` says of its runs: tables for people, one object for programs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import peer
from tokamac.app.commands.bench_runs import Measured
from tokamac.app.commands.bench_stats import Spread, medians, pair_ratios, spread
from tokamac.app.output import table
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.units import UNKNOWN, count, milliseconds, rate, seconds, size
from tokamac.engine.limits.metrics import share

if TYPE_CHECKING:
    from tokamac.engine.core import ModelSpec

RATES = ("ttft_s", "prefill_tps", "decode_tps")
"""What is compared with a peer, by the names of both sides' fields."""


def to_json(measured: Sequence[Measured], peer_version: str | None) -> dict[str, Any]:
    """Return the contract's object: that of the first point; ``sweep`` has one for each point, where there are several."""
    first = _point_json(measured[0], peer_version)
    found = {name: first[name] for name in ("runs", "median", "ceiling_tps", "expected_tps", "peer")}
    if len(measured) > 1:
        found["sweep"] = [_point_json(each, peer_version) for each in measured]
    return found


def of_model(spec: "ModelSpec") -> dict[str, Any]:
    """Return what of a loaded model is not its name: its adapter, by all its bytes, and what is doubted of it."""
    found: dict[str, Any] = {}
    if spec.adapter is not None:
        found["adapter"] = {"name": spec.adapter, "digest": spec.adapter_digest}
    if spec.doubts:
        found["doubts"] = list(spec.doubts)
    return found


def text(model: str, measured: Sequence[Measured], peer_version: str | None) -> str:
    """Return the report for people."""
    one = len(measured) == 1
    parts = [_alone(model, measured[0]) if one else _sweep(model, measured)]
    if peer_version is not None:
        parts.append(_beside(measured, f"{peer.NAME} {peer_version}"))
    return "\n\n".join([*parts, *warnings(measured)])


def warnings(measured: Sequence[Measured]) -> list[str]:
    """Return a sentence for each point with a run that was measured above its ceiling, which nothing can be."""
    return [
        f"{each.point.label}: decode was measured above the ceiling: the bandwidth figure must be wrong "
        f"({rate(fastest)} measured, {rate(ceiling)} the ceiling)"
        for each in measured
        if (fastest := _highest(each)) is not None
        and (ceiling := each.limits.ceiling_tps) is not None
        and fastest > ceiling
    ]


def decode_spread(each: Measured) -> Spread | None:
    """Return the spread of the decode rates at a point, in tokens a second."""
    return spread(run.decode_tps for run in each.runs)


def _highest(each: Measured) -> float | None:
    found = decode_spread(each)
    return None if found is None else found.high


def _point_json(each: Measured, peer_version: str | None) -> dict[str, Any]:
    middle = medians([asdict(run) for run in each.runs])
    spreads = {name: spread(getattr(run, name) for run in each.runs) for name in RATES}
    return {
        "prompt": each.point.tokens if each.point.as_prompt else None,
        "depth": each.point.tokens if each.point.as_depth else None,
        "runs": [asdict(run) for run in each.runs],
        "median": middle,
        "spread": {name: _json(found) for name, found in spreads.items()},
        "ceiling_tps": each.limits.ceiling_tps,
        "expected_tps": each.limits.expected_tps,
        "share_of_ceiling": share(middle["decode_tps"], each.limits.ceiling_tps),
        "share_of_expected": share(middle["decode_tps"], each.limits.expected_tps),
        "peer": None if peer_version is None else _peer_json(each, peer_version),
    }


def _peer_json(each: Measured, version: str) -> dict[str, Any]:
    runs = [asdict(run) for run in each.peer_runs]
    middle = medians(runs)
    return {
        "name": peer.NAME,
        "version": version,
        "median": {name: middle[name] for name in RATES},
        "ratio": {name: _json(_ratio(each, name)) for name in RATES},
        "runs": runs,
    }


def _json(found: Spread | None) -> dict[str, float] | None:
    return None if found is None else found.to_json()


def _ratio(each: Measured, name: str) -> Spread | None:
    """Return ours ÷ the peer's, round by round."""
    return pair_ratios([getattr(run, name) for run in each.runs], [getattr(run, name) for run in each.peer_runs])


def _alone(model: str, each: Measured) -> str:
    middle = medians([asdict(run) for run in each.runs])
    decode, gaps = middle["decode_tps"], middle["itl_ms"] or {}
    shown = [f"{name} {milliseconds(gaps.get(name))}" for name in ("p50", "p95", "p99")]
    rows = [
        ["TTFT", _with_range(seconds, spread(run.ttft_s for run in each.runs))],
        ["prefill", _with_range(rate, spread(run.prefill_tps for run in each.runs))],
        ["decode", _with_range(rate, decode_spread(each))],
        ["ceiling", _reached(decode, each.limits.ceiling_tps)],
        ["expected", _reached(decode, each.limits.expected_tps)],
        ["gaps", ", ".join(shown)],
        ["memory", f"KV {size(middle['kv_bytes'])}, peak {size(middle['peak_memory_bytes'])}"],
    ]
    prompt, new = count(middle["prompt_tokens"]), count(middle["generated_tokens"])
    return f"{sanitise_line(model)}: {prompt} prompt tokens, {new} new; {_runs(each)}\n{table(rows)}"


def _reached(decode: float | None, limit: float | None) -> str:
    return UNKNOWN if limit is None else f"{rate(limit)}; decode reached {_percent(share(decode, limit))} of it"


def _sweep(model: str, measured: Sequence[Measured]) -> str:
    head = ["", "TTFT", "prefill", "decode", "min–max", "ceiling", "expected", "of ceiling"]
    new = count(measured[0].runs[0].generated_tokens)
    rows = [_sweep_row(each) for each in measured]
    title = f"{sanitise_line(model)}: {new} new tokens each; {_runs(measured[0])}"
    return f"{title}\n\n{table([head, *rows], right=range(1, len(head)))}"


def _sweep_row(each: Measured) -> list[str]:
    decode = decode_spread(each)
    middle = None if decode is None else decode.median
    return [
        each.point.label,
        _median(seconds, (run.ttft_s for run in each.runs)),
        _median(rate, (run.prefill_tps for run in each.runs)),
        rate(middle),
        UNKNOWN if decode is None else span(rate, decode.low, decode.high),
        rate(each.limits.ceiling_tps),
        rate(each.limits.expected_tps),
        _percent(share(middle, each.limits.ceiling_tps)),
    ]


def _beside(measured: Sequence[Measured], title: str) -> str:
    """Return the peer's medians, and how many times its figures ours are."""
    head = [title, "TTFT", "prefill", "decode", "TTFT ratio", "prefill ratio", "decode ratio"]
    rows = [
        [
            each.point.label,
            _median(seconds, (run.ttft_s for run in each.peer_runs)),
            _median(rate, (run.prefill_tps for run in each.peer_runs)),
            _median(rate, (run.decode_tps for run in each.peer_runs)),
            *(_with_range(_ratio_text, _ratio(each, name)) for name in RATES),
        ]
        for each in measured
    ]
    told = "ratios are ours ÷ its, of pairs of runs taken in turn on the same prompt"
    return f"{table([head, *rows], right=range(1, len(head)))}\n{told}"


def _runs(each: Measured) -> str:
    if len(each.runs) == 1:
        return "one run, so no spread is known"
    return f"medians of {len(each.runs)} runs (smallest–largest)"


def _with_range(shown: Callable[[float | None], str], found: Spread | None) -> str:
    """Return a median and, where the runs differ, the range they lie in."""
    if found is None:
        return UNKNOWN
    middle = shown(found.median)
    return middle if found.low == found.high else f"{middle} ({span(shown, found.low, found.high)})"


def _median(shown: Callable[[float | None], str], values: Iterable[float | None]) -> str:
    found = spread(values)
    return shown(None if found is None else found.median)


def span(shown: Callable[[float | None], str], low: float, high: float) -> str:
    """Return both ends; a unit that they share is written once: ``0.2–0.4 s``."""
    first, last = shown(low).split(" "), shown(high).split(" ")
    if len(first) == len(last) == 2 and first[1:] == last[1:]:
        first = first[:1]
    return f"{' '.join(first)}–{' '.join(last)}"


def _ratio_text(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"
