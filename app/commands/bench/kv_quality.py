"""``tokamac bench --kv-quality``: quality cost and savings of each KV quantization, with a recommendation."""

# Default text: assets/kv_quality.txt, about 1,500 tokens of prose, a list that is asked about later, code, a table and
# dialogue: KV quantization errors show where a model looks far back.

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tokamac.assets import asset_path
from tokamac.engine.errors import access_hint
from tokamac.engine.files import expanded, read_text
from tokamac.engine.lab.scoring import (
    FASTER,
    LEAST_TOP1,
    MOST_KL,
    Advice,
    KVDivergence,
    Trial,
    TrialProgress,
    fit_depths,
    recommend,
)
from tokamac.engine.options import KVSpec

from ...options import SAMPLING_FLAGS, default_model, kv_spec, positive
from ...parser import Parser
from ...text.terminal import Progress, json_line, note, picked, table
from ...text.units import UNKNOWN, count, rate, size
from .. import loading
from ..prompts import LONGEST_INPUT, InputError

if TYPE_CHECKING:
    from tokamac.engine import Engine

# Bits of keys and values, from the largest: 6 and 8,4 take the same bytes, which shows what keys are worth.
SETTINGS = ((16, 16), (8, 8), (6, 6), (8, 4), (6, 4), (4, 4))

DEPTHS = (128, 1024, 4096)

# Flags of `bench` that have no effect here, by their names in the parsed options.
IDLE = {"prompt": "--prompt", "runs": "--runs", "on_full": "--on-full"} | {
    name: flag for flag, name in SAMPLING_FLAGS.items()
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV quality")
    group.add_argument(
        "--kv-quality",
        action="store_true",
        help="compare KV settings: bytes, KL to 16 bits, matching top tokens, decode speed; --kv-bits adds one",
    )
    group.add_argument("-f", "--text", metavar="FILE", help="text to compare on (default: a built-in one)")
    shown = ",".join(map(str, DEPTHS))
    group.add_argument(
        "--depths", type=depth_list, metavar="N,N…", help=f"contexts to measure decode at (default: {shown})"
    )


def depth_list(text: str) -> tuple[int, ...]:
    """Parse ``128,1024``."""
    return tuple(positive(part) for part in text.split(","))


def refuse_flags(parser: Parser, options: argparse.Namespace) -> None:
    """Exit with status 2 for flags of ``--kv-quality`` only."""
    for name in ("text", "depths"):
        if getattr(options, name) is not None:
            parser.error(f"--{name} has no effect without --kv-quality")


def run(parser: Parser, options: argparse.Namespace) -> int:
    base = _base(parser, options)
    settings = tuple(dict.fromkeys((*SETTINGS, *(() if options.kv_bits is None else (options.kv_bits,)))))
    text = shipped_text() if options.text is None else _read(options.text)
    model = options.model or default_model()
    with loading.load(options, model, base) as engine:
        ids = _within(engine.tokenizer.encode(text), engine.spec.context_length)
        trials = measure(engine, ids, settings, base, _depths(engine, options.depths or DEPTHS))
        memory, shown = engine.memory(), engine.spec.notes if base != KVSpec() else ()  # shown when it was loaded
    advice = recommend(trials, None if memory.budget is None else max(0, memory.budget - memory.active))
    for remark in dict.fromkeys(remark for trial in trials for remark in trial.notes if remark not in shown):
        note(f"note: {remark}")
    source = "a built-in text" if options.text is None else options.text
    if options.json:
        text_read = {"source": source, "tokens": len(ids)}
        json_line({"model": model, "text": text_read, **_json(base, trials, advice)})
    else:
        print(f"{model}: {_heading(source, len(ids), base)}\n")
        print(f"{_table(trials)}\n\n{sentence(advice)}")
    return 0


def shipped_text() -> str:
    return asset_path("kv_quality.txt").read_text(encoding="utf-8")


def measure(
    engine: "Engine", ids: list[int], settings: Sequence[tuple[int, int]], base: KVSpec, depths: Sequence[int]
) -> list[Trial]:
    """Return a Trial per setting, in order; progress on stderr. Raises OptionError."""
    found: dict[tuple[int, int], Trial] = {}
    bar, phase = Progress("", plain=False), "none yet"
    try:
        with closing(engine.compare_kv(ids, settings, base, depths=depths)) as steps:
            for step in steps:
                if not isinstance(step, TrialProgress):
                    bar.clear()
                    found[step.key_bits, step.value_bits] = step
                    note(_line(step))
                    continue
                if step.bits != phase:
                    bar.clear()
                    phase = step.bits
                    label = f"decoding with {phase} bits" if phase else "reading the text with every setting"
                    bar = Progress(label, unit="tokens", plain=not phase)
                bar.update(step.done, step.total)
    finally:
        bar.clear()
    return [found[bits] for bits in settings]


def sentence(advice: Advice) -> str:
    pick, smallest = advice.pick, advice.smallest
    limits = f"KL up to {MOST_KL:g} nats and {LEAST_TOP1:.0%} of matching top tokens"
    deep = f"at depth {pick.decode[-1].depth:,}" if pick.decode else "at depth"
    faster = f"decodes {FASTER - 1:.0%} faster {deep}"
    use = "leave keys and values at 16 bits" if pick.exact else f"--kv-bits {pick.bits}"
    if advice.why == "exact":
        little = f"{size(pick.context_bytes)} for the whole context is little for this machine"
        reason = f"{little}, and no packed cache that is good enough {faster}"
    elif advice.why == "alone":
        reason = f"no packed cache is good enough on this text ({limits})"
    elif advice.why == "faster":
        rates = f"{rate(smallest.deep_tps)} {deep} against {rate(pick.deep_tps)}"
        reason = f"{smallest.bits} is smaller and good enough ({limits}), but decodes {rates}"
    else:
        reason = f"the smallest cache that is good enough ({limits}), and no larger one {faster}"
    return f"Recommended here: {use}: {reason}."


def _base(parser: Parser, options: argparse.Namespace) -> KVSpec:
    """Return the window and group size shared by all settings; exits with status 2 at a flag without effect."""
    for name, flag in IDLE.items():
        if getattr(options, name, None) is not None:
            parser.error(f"{flag} has no effect with --kv-quality")
    if options.kv_keep == "system":
        parser.error("--kv-keep: there is no system prompt with --kv-quality; give a number of tokens")
    shared = argparse.Namespace(**{**vars(options), "kv_bits": None})
    return replace(kv_spec(parser, shared, KVSpec(8, 8)), key_bits=16, value_bits=16)


def _read(name: str) -> str:
    try:
        text = read_text(expanded(name), LONGEST_INPUT, "utf-8-sig")
    except OSError as error:
        raise InputError(
            f"{name} can't be read: {error.strerror}", access_hint(error, "Check the path given to --text.")
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text", "Only text can be read; convert it first.") from error
    if not text.strip():
        raise InputError(f"{name} is empty", "Give a text of some hundred words or more.")
    return text


def _within(ids: list[int], context_length: int | None) -> list[int]:
    if context_length is not None and len(ids) > context_length:
        note(f"note: the text has {len(ids):,} tokens; the model's context takes the first {context_length:,}")
        return ids[:context_length]
    return ids


def _depths(engine: "Engine", wanted: Sequence[int]) -> tuple[int, ...]:
    from tokamac.engine.lab.scoring import TIMED_TOKENS

    context_length = engine.spec.context_length
    depths = fit_depths(wanted, None if context_length is None else context_length - TIMED_TOKENS)
    if depths != tuple(sorted(set(wanted))):
        listed = ", ".join(f"{depth:,}" for depth in depths)
        note(f"note: the model's context is {count(context_length)} tokens, so decoding is timed at depth {listed}")
    return depths


def _line(trial: Trial) -> str:
    if trial.refused is not None:
        return f"{trial.bits} bits: {trial.refused}"
    rates = ", ".join(f"{rate(speed.tps)} at {speed.depth:,}" for speed in trial.decode)
    return f"{trial.bits} bits: KL {_kl(trial.quality)}, decode {rates}"


def _heading(source: str, tokens: int, base: KVSpec) -> str:
    window = "" if base.window is None else f", window {base.window:,} of which {base.keep} pinned"
    return f"{source}, {tokens:,} tokens; groups of {base.group_size}{window}"


def _table(trials: Sequence[Trial]) -> str:
    depths = next(trial.decode for trial in trials if trial.decode)
    head = ["bits", "a token", "of 16", "KL, nats", "top-1", *(f"at {speed.depth:,}" for speed in depths)]
    whole = next(trial for trial in trials if trial.exact).bytes_per_token
    rows = [_row(trial, whole) if trial.refused is None else [trial.bits, *[""] * (len(head) - 1)] for trial in trials]
    lines = table([head, *rows], right=range(1, len(head))).splitlines()
    width = max(len(row[0]) for row in (head, *rows))
    shown = [
        line if trial.refused is None else f"{trial.bits.ljust(width)}  {trial.refused}"
        for line, trial in zip(lines[1:], trials, strict=True)
    ]
    return "\n".join([lines[0], *shown])


def _row(trial: Trial, whole: int | None) -> list[str]:
    share = f"{trial.bytes_per_token / whole:.0%}" if trial.bytes_per_token is not None and whole else UNKNOWN
    top1 = UNKNOWN if trial.quality is None else f"{trial.quality.top1:.1%}"
    rates = [rate(speed.tps) for speed in trial.decode]
    return [trial.bits, size(trial.bytes_per_token), share, _kl(trial.quality), top1, *rates]


def _kl(quality: KVDivergence | None) -> str:
    return UNKNOWN if quality is None or quality.kl_nats is None else f"{quality.kl_nats:.5f}"


def _json(base: KVSpec, trials: Sequence[Trial], advice: Advice) -> dict[str, Any]:
    pick = advice.pick
    return {
        "kv": {"group_size": base.group_size, "window": base.window, "keep": base.keep if base.window else None},
        "settings": [_json_setting(trial) for trial in trials],
        "recommended": {**picked(pick, "key_bits", "value_bits"), "why": advice.why, "reason": sentence(advice)},
    }


def _json_setting(trial: Trial) -> dict[str, Any]:
    quality = trial.quality
    return {
        **picked(trial, "key_bits", "value_bits", "bytes_per_token", "context_bytes"),
        **picked(quality, "kl_nats"),
        "top1_share": None if quality is None else quality.top1,
        **picked(quality, "positions"),
        "decode": [picked(speed, "depth", "tps") for speed in trial.decode],
        "refused": trial.refused,
        "notes": list(trial.notes),
    }
