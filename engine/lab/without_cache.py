"""The value of a KV cache: steps with and without one, sizes, request capacity."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ..errors import OptionError
from ..perf.hardware import lookup
from ..perf.roofline import Phase, decode_phase, prefill_phase

if TYPE_CHECKING:
    from ..perf.footprint import Footprint
    from ..perf.what_if import Machine, WeighedModel, WhatIfCase


# with      prompt, then 1 + 1 + 1 + …            n tokens in n steps
# without   prompt, prompt + 1, prompt + 2, …     n (n + 1) ÷ 2 of them, for a prompt of one token

# A unit is one token through the model; seconds are expected ones, or the least possible if unknown.


MOST_STEPS = 4096  # steps that are summed up; a longer reply is cut there
WINDOW, SINKS = 4096, 4
CODECS = ((16, 16), (8, 8), (8, 4), (4, 4))  # bits of keys and values that are compared
GIB = 1 << 30


def units_with(prompt: int, steps: int) -> int:
    return prompt + steps - 1 if steps else 0


def units_without(prompt: int, steps: int) -> int:
    return steps * prompt + steps * (steps - 1) // 2


@dataclass(frozen=True, slots=True)
class StepPair:
    step: int
    units_with: int
    units_without: int
    seconds_with: float | None
    seconds_without: float | None


@dataclass(frozen=True, slots=True)
class KVSize:
    window: int | None
    sinks: int
    key_bits: int
    value_bits: int
    nbytes: tuple[int, ...] = ()
    requests: int | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class CacheWorth:
    prompt: int
    reply: int
    expected: bool
    steps: tuple[StepPair, ...]
    total: StepPair
    context: int
    contexts: tuple[int, ...]
    sizes: tuple[KVSize, ...]
    weight_bytes: int
    budget_bytes: int | None


def cache_worth(weighed: "Footprint", case: "WhatIfCase", place: "Machine", contexts: Sequence[int]) -> CacheWorth:
    """Return a cache's value for a weighed model. Raises OptionError for unsupported KV settings."""
    from ..perf.what_if import load

    loaded = load(weighed, case.kv, place)
    reply = min(max(case.context - case.prompt, 1), MOST_STEPS)
    pairs, expected = _pairs(loaded, case.prompt, reply)
    fit = loaded.fit(case)
    return CacheWorth(
        prompt=case.prompt,
        reply=reply,
        expected=expected,
        steps=tuple(pairs[step - 1] for step in shown_steps(reply)),
        total=StepPair(
            reply,
            units_with(case.prompt, reply),
            units_without(case.prompt, reply),
            _sum(pair.seconds_with for pair in pairs),
            _sum(pair.seconds_without for pair in pairs),
        ),
        context=case.context,
        contexts=tuple(contexts),
        sizes=tuple(_sizes(loaded, case, contexts)),
        weight_bytes=fit.weights,
        budget_bytes=fit.budget,
    )


def shown_steps(reply: int) -> list[int]:
    doubled = accumulate(range(reply.bit_length()), lambda at, _: at * 2, initial=1)
    return sorted({*(step for step in doubled if step < reply), reply})


def _pairs(loaded: "WeighedModel", prompt: int, reply: int) -> tuple[list[StepPair], bool]:
    work, chip, latency = loaded.work, loaded.place.chip, loaded.latency
    chunk, pairs, expected = loaded.chunking.tokens_at(prompt), [], True
    first = prefill_phase(work, chip, latency, prompt, chunk=chunk)
    for step in range(1, reply + 1):
        held = prompt + step - 1
        again = first if step == 1 else prefill_phase(work, chip, latency, held, chunk=chunk)
        kept = first if step == 1 else decode_phase(work, chip, latency, held)
        expected = expected and again.expected_s is not None and kept.expected_s is not None
        pairs.append((step, held, kept, again))
    return [
        StepPair(step, held if step == 1 else 1, held, *(_seconds(each, expected=expected) for each in (kept, again)))
        for step, held, kept, again in pairs
    ], expected


def _seconds(phase: Phase, *, expected: bool) -> float | None:
    if expected:
        return phase.expected_s
    return None if phase.bound is None and phase.tokens > 1 else phase.ceiling_s


def _sum(values: Iterator[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _sizes(loaded: "WeighedModel", case: "WhatIfCase", contexts: Sequence[int]) -> Iterator[KVSize]:
    for window, sinks in ((None, 0), (WINDOW, 0), (WINDOW, SINKS)):
        for key_bits, value_bits in CODECS:
            size = KVSize(window, sinks, key_bits, value_bits)
            kept = {"window": window, "keep": sinks} if window is not None else {"window": None, "keep": SINKS}
            try:
                plan, work = loaded.weighed.planned(replace(case.kv, key_bits=key_bits, value_bits=value_bits, **kept))
            except OptionError as error:
                yield replace(size, refused=error.message)
                continue
            fitting = replace(loaded, plan=plan, work=work).most_at_once(case)
            yield replace(size, nbytes=tuple(plan.bytes_at(each) for each in contexts), requests=fitting)


# Well-known examples ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownFigure:
    label: str
    value: float
    unit: str
    said: str
    how: str


def reading_ms(weight_bytes: float, bandwidth_gbs: float) -> float:
    return weight_bytes / (bandwidth_gbs * 1e6)


@dataclass(frozen=True, slots=True)
class CompressedLayers:
    layers: int
    numbers: int
    every: int = 1

    def nbytes(self, context: int, value_bytes: int = 2) -> int:
        return self.layers * (context // self.every) * self.numbers * value_bytes


# Entries of 512 numbers, with keys of 128 that choose among them where four tokens make one; 128 tokens of each layer's
# window, of a million. (config.json of nvidia/DeepSeek-V4-Pro-NVFP4: compress_ratios, head_dim, index_head_dim,
# sliding_window.)
DEEPSEEK_V4_PRO = (CompressedLayers(30, 512 + 128, 4), CompressedLayers(31, 512, 128), CompressedLayers(61, 512, 8192))
# A latent of 512, its rotary key of 64 and an index key of 128 for each token. (config.json of
# deepseek-ai/DeepSeek-V3.2.)
DEEPSEEK_V3_2 = (CompressedLayers(61, 512 + 64 + 128),)
MILLION = 1 << 20


def known_figures() -> tuple[KnownFigure, ...]:
    llama, seventy, h100 = 16e9, 35e9, _bandwidth("NVIDIA H100 80GB HBM3")
    step = reading_ms(llama, h100)
    cards = {
        "RTX 4090": ("NVIDIA GeForce RTX 4090", "29"),
        "RTX 3090": ("NVIDIA GeForce RTX 3090", "27"),
        "A100 80GB": ("NVIDIA A100-SXM4-80GB", "58"),
        "M2 Ultra": ("Apple M2 Ultra", "23"),
    }
    speeds = []
    for name, (chip, said) in cards.items():
        gbs = _bandwidth(chip)
        how = f"{gbs:,.0f} GB/s ÷ 35 GB"
        speeds.append(KnownFigure(f"70B at 4 bits, {name}", 1e3 / reading_ms(seventy, gbs), "tok/s", said, how))
    request = 4000 / 1024  # 4,000 tokens of 1 MiB each, in GiB
    return (
        KnownFigure("Llama-3-8B on an H100, one pass", step, "ms", "4.78", f"16 GB ÷ {h100:,.0f} GB/s"),
        KnownFigure("Llama-3-8B on an H100, at most", 1e3 / step, "tok/s", "209", "1 ÷ one pass"),
        *speeds,
        KnownFigure("7B at 4 bits", 7e9 * 4 / 8 / 1e9, "GB", "3.5", "7 × 10⁹ weights × 4 ÷ 8 bytes"),
        KnownFigure("13B at 1 MB a token, 4k tokens", request, "GiB", "3.9", "4,000 × 1 MiB"),
        KnownFigure("requests of that on 80 GB", 80 // request, "", "20", "80 ÷ 3.9, no weights counted"),
        KnownFigure("14 steps with a cache", units_with(1, 14), "units", "14", "1 a step"),
        KnownFigure("14 steps without", units_without(1, 14), "units", "105", "1 + 2 + … + 14"),
        KnownFigure(
            "DeepSeek V4 Pro, 1M tokens",
            _gib(DEEPSEEK_V4_PRO),
            "GiB",
            "9.62",
            "30 layers ÷ 4, 31 layers ÷ 128, 2 bytes",
        ),
        KnownFigure(
            "the same as DeepSeek V3.2 keeps it", _gib(DEEPSEEK_V3_2), "GiB", "83.9", "61 layers × 704 × 2 bytes"
        ),
    )


def _gib(layers: Sequence[CompressedLayers]) -> float:
    return sum(each.nbytes(MILLION) for each in layers) / GIB


def _bandwidth(chip: str) -> float:
    known = lookup(chip).bandwidth_gbs
    assert known is not None  # of the table's chips
    return known
