"""``tokamac bench``: one warm-up, then runs that are each computed afresh; medians, beside what the machine allows.

Every run reads a prompt of its own, so nothing is cached, and prefill is measured whole. ``--kv-quality`` compares ways to
keep keys and values instead (kv_quality.py).
"""

import argparse
import statistics
from dataclasses import asdict, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import kv_quality, loading
from tokamac.app.options import Parser, add_kv_flags, add_sampling_flags, default_model, kv_spec, positive, sampling
from tokamac.app.output import json_line, note, table
from tokamac.app.tui.units import count, milliseconds, rate, seconds, size
from tokamac.engine.events import Finished
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.options import Sampling

if TYPE_CHECKING:
    from tokamac.engine import Engine

PROMPT_TOKENS = 512
NEW_TOKENS = 128
RUNS = 5

TEXT = (
    "The river had risen in the night, and by morning the lower fields were a lake with fences standing in it. Nobody in the "
    "village was surprised. They moved the sheep to the hill, put the boats where the carts had been, and went on with the day. "
)


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "bench",
        "Measure TTFT, prefill and decode on this machine: a warm-up, then runs on prompts of their own; medians. "
        "With --kv-quality: what each KV setting costs in quality, what it saves, and which to use.",
        "  tokamac bench\n  tokamac bench mlx-community/Qwen3-4B-Instruct-2507-4bit --prompt 2048 --runs 3 --json\n"
        "  tokamac bench guide --kv-quality --kv-window 2048",
    )
    made.add_argument("model", nargs="?", metavar="MODEL", help="a folder, a Hugging Face id, or guide")
    made.add_argument("--prompt", type=positive, metavar="N", help=f"tokens to read ({PROMPT_TOKENS})")
    made.add_argument("--runs", type=positive, metavar="N", help=f"runs after the warm-up ({RUNS})")
    made.add_argument("--json", action="store_true", help="one JSON object")
    kv_quality.add_flags(made)
    add_sampling_flags(made)
    add_kv_flags(made)
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Measure, and return the exit status."""
    if options.kv_quality:
        return kv_quality.run(parser, options)
    kv_quality.refuse_flags(parser, options)
    length, times = options.prompt or PROMPT_TOKENS, options.runs or RUNS
    wanted, kv = sampling(parser, options), kv_spec(parser, options)
    wanted = replace(wanted, max_tokens=wanted.max_tokens or NEW_TOKENS)
    model = options.model or default_model()
    # Nothing is ever reused here, with or without --no-prompt-cache.
    with loading.load(model, kv=kv, prompt_cache=None) as engine:
        note(f"warming up, then {times} runs of {length:,} prompt tokens and {wanted.max_tokens:,} new ones")
        _measure(engine, prompt_ids(engine, length, 0), wanted)
        runs = []
        for number in range(1, times + 1):
            runs.append(_measure(engine, prompt_ids(engine, length, number), _seeded(wanted, number)))
            note(f"run {number}: prefill {rate(runs[-1].prefill_tps)}, decode {rate(runs[-1].decode_tps)}")
    if any(metrics.generated_tokens < (wanted.max_tokens or 0) for metrics in runs):
        note("note: the model ended some replies early, so their decode rates come from fewer tokens")
    report(model, runs, json_wanted=options.json)
    return 0


def prompt_ids(engine: "Engine", length: int, number: int) -> list[int]:
    """Return ``length`` token ids of ordinary text; different from the first one on for every ``number``."""
    ids = engine.tokenizer.encode(TEXT)
    begin = (7 * number) % len(ids)
    return list(islice(cycle(ids[begin:] + ids[:begin]), length))


def report(model: str, runs: list[Metrics], *, json_wanted: bool) -> None:
    """Write the result to stdout."""
    middle = medians([asdict(metrics) for metrics in runs])
    if json_wanted:
        ceilings = {name: middle[name] for name in ("ceiling_tps", "expected_tps")}
        json_line({"runs": [asdict(metrics) for metrics in runs], "median": middle, **ceilings, "peer": None})
        return
    decode, ceiling = middle["decode_tps"], middle["ceiling_tps"]
    share = f"{decode / ceiling:.0%} of it" if decode is not None and ceiling else "unknown share of it"
    gaps = middle["itl_ms"] or {}
    rows = [
        ["TTFT", seconds(middle["ttft_s"])],
        ["prefill", rate(middle["prefill_tps"])],
        ["decode", rate(decode)],
        ["ceiling", f"{rate(ceiling)}; decode reached {share}"],
        [
            "gaps",
            f"p50 {milliseconds(gaps.get('p50'))}, p95 {milliseconds(gaps.get('p95'))}, p99 {milliseconds(gaps.get('p99'))}",
        ],
        ["memory", f"KV {size(middle['kv_bytes'])}, peak {size(middle['peak_memory_bytes'])}"],
    ]
    print(
        f"{model}: {count(middle['prompt_tokens'])} prompt tokens, {count(middle['generated_tokens'])} new; medians of {len(runs)}"
    )
    print(table(rows))


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return field by field the median of what is known; None where no run knows it."""
    middle: dict[str, Any] = {}
    for name in runs[0]:
        known = [run[name] for run in runs if run[name] is not None]
        if known and isinstance(known[0], dict):
            middle[name] = medians(known)
        elif known and all(isinstance(value, int) for value in known):
            middle[name] = statistics.median_low(known)  # a count stays whole
        else:
            middle[name] = statistics.median(known) if known else None
    return middle


def _seeded(wanted: Sampling, number: int) -> Sampling:
    return wanted if wanted.seed is not None else replace(wanted, seed=number)


def _measure(engine: "Engine", ids: list[int], wanted: Sampling) -> Metrics:
    for event in engine.generate(ids, wanted):
        if isinstance(event, Finished):
            return event.metrics
    raise AssertionError("a reply ends with Finished")
