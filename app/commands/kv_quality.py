"""``tokamac bench --kv-quality``: what each way to keep keys and values costs in quality, what it saves, and one to recommend.

What ``bench --kv-quality`` reads unless it is given a file: a page of several kinds of text, about 1,500 tokens, our own.

Prose, a list that is asked about later, code, a table and a dialogue: packing keys and values shows where a model
looks far back. The story and the figures in it are invented.
"""

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.app.commands import loading
from tokamac.app.commands.ask import LONGEST_INPUT, InputError
from tokamac.app.options import SAMPLING_FLAGS, adapter_of, default_model, kv_spec, memory_limit, positive
from tokamac.app.output import Progress, json_line, note, table
from tokamac.app.parser import Parser
from tokamac.app.units import UNKNOWN, count, rate, size
from tokamac.engine.errors import access_hint
from tokamac.engine.files import read_text
from tokamac.engine.kv.divergence import (
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

if TYPE_CHECKING:
    from tokamac.engine import Engine


TEXT = """\
A language model answers in two phases that have little in common. In the first it reads: the whole prompt goes \
through every layer at once, many tokens side by side, and the chip is busy with arithmetic. In the second it \
writes: one token, then the next, and each of them needs all the weights again. Nothing but the order of events ties \
the two together, and yet a person at the keyboard feels them as a single thing, the speed of the machine.

What the first phase leaves behind for the second is a store of keys and values. For every token that was read, each \
layer keeps one vector that says what the token offers and one that says what it carries. A new token asks a \
question of all the keys, weighs the values by how well they match, and goes on with the mixture. Without the store \
the model would have to read the conversation from its beginning for every word it writes. With it, a word costs one \
pass. The price is memory, and it grows with every token: at a context of a few thousand tokens the store of a large \
model is as heavy as a film.

So people make it smaller. Numbers that came with sixteen bits are written down with eight, or four, a group of them \
sharing one scale and one offset. The keys suffer more than the values. A key is compared, and a small error in it \
can move the attention to another place; a value is averaged with others, and its errors cancel in part. That is why \
eight bits for the keys and four for the values may do better than six for both, although the bytes are the same.

Here is what was in the drawer of the ferryman's desk on the morning the inspector came:

1. a brass key with a red ribbon, for the boathouse;
2. three letters from Marisol, tied with string, the last one unopened;
3. a tide table for the year 1911, with the ninth of October underlined;
4. a pipe, a knife and eleven copper coins;
5. the photograph of a dog named Harrow, who had been dead for six years.

The inspector wrote everything down in the order in which he found it. He was a slow man, and people took him for a \
stupid one, which had been of use to him more than once. "You have not read the last letter," he said.

"No," said the ferryman.

"May I ask why?"

"You may ask." He looked out at the water. It had risen in the night, and the posts of the landing stage stood up to \
their necks in it. "She writes that she is coming, or she writes that she is not. As long as it is closed, I can \
have breakfast."

The inspector thought about this for some time. Then he took the tide table, and put his finger on the day that was \
underlined. "And the ninth of October? What happened then?"

"Nothing happened then. That is why I underlined it."

Later, when the inspector told the story at home, he could still name every object: the brass key with the red \
ribbon, the three letters from Marisol, the tide table for the year 1911, the pipe, the knife and the eleven copper \
coins, and last of all the photograph of the dog named Harrow. His wife asked which of them had mattered. "The dog," \
he said, "of course."

The same afternoon, a long way off and a hundred years later, somebody wrote a function to find out how often each \
word of a text appears, and was not content with it:

```python
from collections import Counter


def most_frequent(text: str, count: int = 10) -> list[tuple[str, int]]:
    \"\"\"Return the words that appear most often, and how often, in falling order.\"\"\"
    words = (word.strip(".,;:!?\\"'()").lower() for word in text.split())
    counted = Counter(word for word in words if word)
    return counted.most_common(count)


def test_most_frequent() -> None:
    assert most_frequent("The cat saw the dog. The dog slept.", 2) == [("the", 3), ("dog", 2)]
```

It is short, and it is right for English, more or less. But a hyphen at the end of a line makes two words of one, an \
apostrophe is kept in the middle and dropped at the edge, and a language without spaces has one word only. The \
function `most_frequent` would say so politely, with a list of length one.

Measured on four machines, reading and writing (tokens a second):

| machine | memory, GB/s | reading | writing | context |
| --- | --- | --- | --- | --- |
| small laptop | 100 | 240 | 18.5 | 4,096 |
| large laptop | 400 | 760 | 71.0 | 4,096 |
| workstation | 800 | 1,490 | 136.2 | 8,192 |
| server card | 3,350 | 11,800 | 402.7 | 8,192 |

The column for writing follows the column for memory almost exactly: four times the bandwidth, four times the \
tokens. The column for reading does not, since reading waits for arithmetic and not for memory. The server card is \
the odd one out. At 3,350 gigabytes a second it should write more than five hundred tokens, and it stops at 402.7, \
because between two layers it has to wait for itself.

Question: which of the four machines writes 71.0 tokens a second?
Answer: the large laptop.
Question: what was tied to the brass key in the drawer?
Answer: a red ribbon.
Question: and how many letters were there, and from whom?
Answer: three letters, from Marisol, the last one unopened.

Whoever reads a page like this one from the top can give these answers without effort, because everything needed is \
still in sight. For the model it is in sight as well, in the keys and the values of tokens it read a thousand \
positions ago. If those were written down too coarsely, it will not fall silent. It will say, in the same even \
voice, that the ribbon was green.
"""


SETTINGS = ((16, 16), (8, 8), (6, 6), (8, 4), (6, 4), (4, 4))
"""Bits of keys and values, from the largest: 6 and 8,4 take the same bytes, which shows what keys are worth."""

DEPTHS = (128, 1024, 4096)

IDLE = {"prompt": "--prompt", "runs": "--runs", "on_full": "--on-full"} | {
    name: flag for flag, name in SAMPLING_FLAGS.items()
}
"""Flags of ``bench`` that have no effect here, by their names in the parsed options."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what only ``--kv-quality`` takes."""
    group = parser.add_argument_group("KV quality")
    group.add_argument(
        "--kv-quality",
        action="store_true",
        help="compare KV settings: bytes, KL to 16 bits, equal likeliest tokens, decode at depth; --kv-bits adds one",
    )
    group.add_argument("-f", "--text", metavar="FILE", help="the text to compare on (one of our own)")
    shown = ",".join(map(str, DEPTHS))
    group.add_argument("--depths", type=depth_list, metavar="N,N…", help=f"contexts to time decoding at ({shown})")


def depth_list(text: str) -> tuple[int, ...]:
    """Return depths from ``128,1024``."""
    return tuple(positive(part) for part in text.split(","))


def refuse_flags(parser: Parser, options: argparse.Namespace) -> None:
    """End with exit status 2 where a flag was given that only ``--kv-quality`` takes."""
    for name in ("text", "depths"):
        if getattr(options, name) is not None:
            parser.error(f"--{name} has no effect without --kv-quality")


def run(parser: Parser, options: argparse.Namespace) -> int:
    """Measure, and return the exit status."""
    base, settings = _base(parser, options), _settings(options)
    text = TEXT if options.text is None else _read(options.text)
    model = options.model or default_model()
    with loading.load(
        model,
        kv=base,
        prompt_cache=None,
        memory=memory_limit(options),
        unchecked=options.unchecked,
        adapter=adapter_of(options, model),
    ) as engine:
        ids = _within(engine.tokenizer.encode(text), engine.spec.context_length)
        trials = measure(engine, ids, settings, base, _depths(engine, options.depths or DEPTHS))
        memory, said = engine.memory(), engine.spec.notes if base != KVSpec() else ()  # when it was loaded
    advice = recommend(trials, None if memory.budget is None else max(0, memory.budget - memory.active))
    for remark in dict.fromkeys(remark for trial in trials for remark in trial.notes if remark not in said):
        note(f"note: {remark}")
    source = "a text of our own" if options.text is None else options.text
    if options.json:
        text_read = {"source": source, "tokens": len(ids)}
        json_line({"model": model, "text": text_read, **_json(base, trials, advice)})
    else:
        print(f"{model}: {_heading(source, len(ids), base)}\n")
        print(f"{_table(trials)}\n\n{sentence(advice)}")
    return 0


def measure(
    engine: "Engine", ids: list[int], settings: Sequence[tuple[int, int]], base: KVSpec, depths: Sequence[int]
) -> list[Trial]:
    """Return a Trial for each setting, in the order of ``settings``; progress goes to stderr. Raises OptionError."""
    found: dict[tuple[int, int], Trial] = {}
    bars: dict[str, Progress] = {}
    try:
        with closing(engine.compare_kv(ids, settings, base, depths=depths)) as steps:
            for step in steps:
                if isinstance(step, TrialProgress):
                    _bar(bars, step.bits).update(step.done, step.total)
                    continue
                _clear(bars)
                found[step.key_bits, step.value_bits] = step
                note(_line(step))
    finally:
        _clear(bars)
    return [found[bits] for bits in settings]


def sentence(advice: Advice) -> str:
    """Return the recommendation and its reason."""
    pick, smallest = advice.pick, advice.smallest
    limits = f"KL up to {MOST_KL:g} nats and {LEAST_TOP1:.0%} of equal likeliest tokens"
    deep = f"at depth {pick.decode[-1].depth:,}" if pick.decode else "at depth"
    use = "leave keys and values at 16 bits" if pick.exact else f"--kv-bits {pick.bits}"
    if advice.why == "exact":
        reason = f"{size(pick.context_bytes)} at the whole context is little for this machine, and no good packed cache decodes "
        reason += f"{FASTER - 1:.0%} faster {deep}"
    elif advice.why == "alone":
        reason = f"no packed cache is good enough on this text ({limits})"
    elif advice.why == "faster":
        reason = f"{smallest.bits} is smaller and good enough ({limits}), but decodes {rate(smallest.deep_tps)} {deep} against "
        reason += rate(pick.deep_tps)
    else:
        reason = f"the smallest cache that is good enough ({limits}), and no larger one decodes {FASTER - 1:.0%} faster {deep}"
    return f"Recommended here: {use}: {reason}."


def _base(parser: Parser, options: argparse.Namespace) -> KVSpec:
    """Return the window and the groups that all settings share. Ends with exit status 2 at a flag without effect."""
    for name, flag in IDLE.items():
        if getattr(options, name, None) is not None:
            parser.error(f"{flag} has no effect with --kv-quality")
    if options.kv_keep == "system":
        parser.error("--kv-keep: there is no system prompt with --kv-quality; give a number of tokens")
    shared = argparse.Namespace(**{**vars(options), "kv_bits": None})
    return replace(kv_spec(parser, shared, KVSpec(8, 8)), key_bits=16, value_bits=16)


def _settings(options: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """Return the settings to compare: ours, and the user's ``--kv-bits``."""
    asked = () if options.kv_bits is None else (options.kv_bits,)
    return tuple(dict.fromkeys((*SETTINGS, *asked)))


def _read(name: str) -> str:
    try:
        text = read_text(Path(name).expanduser(), LONGEST_INPUT, "utf-8-sig")
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


def _depths(engine: "Engine", asked: Sequence[int]) -> tuple[int, ...]:
    """Return the depths that the model's context can hold; what is reduced is said aloud."""
    from tokamac.engine.scoring import TIMED_TOKENS

    context_length = engine.spec.context_length
    depths = fit_depths(asked, None if context_length is None else context_length - TIMED_TOKENS)
    if depths != tuple(sorted(set(asked))):
        listed = ", ".join(f"{depth:,}" for depth in depths)
        note(f"note: the model's context is {count(context_length)} tokens, so decoding is timed at depth {listed}")
    return depths


def _bar(bars: dict[str, Progress], bits: str) -> Progress:
    """Return the bar of this phase; that of the one before is gone from the screen."""
    if bits not in bars:
        _clear(bars)
        label = f"decoding with {bits} bits" if bits else "reading the text with every setting"
        bars[bits] = Progress(label, unit="tokens", plain=not bits)
    return bars[bits]


def _clear(bars: dict[str, Progress]) -> None:
    for bar in bars.values():
        bar.clear()


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
        "recommended": {
            "key_bits": pick.key_bits,
            "value_bits": pick.value_bits,
            "why": advice.why,
            "reason": sentence(advice),
        },
    }


def _json_setting(trial: Trial) -> dict[str, Any]:
    quality = trial.quality
    return {
        "key_bits": trial.key_bits,
        "value_bits": trial.value_bits,
        "bytes_per_token": trial.bytes_per_token,
        "context_bytes": trial.context_bytes,
        "kl_nats": None if quality is None else quality.kl_nats,
        "top1_share": None if quality is None else quality.top1,
        "positions": None if quality is None else quality.positions,
        "decode": [{"depth": speed.depth, "tps": speed.tps} for speed in trial.decode],
        "refused": trial.refused,
        "notes": list(trial.notes),
    }
