"""Replies of seeded models, to the bit: families × types × caches × sampling, alone, several together, and turn after turn.

``python -m tests.golden.replies`` writes ``replies.json`` from the code as it is; ``test_golden_replies.py`` compares with it.
"""

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.golden.weights import write_weights
from tokamac.engine import Engine, Event, Finished, KVSpec, Message, Sampling, TextChunk, ToolCall

HERE = Path(__file__).parent
FILE = HERE / "replies.json"
MACHINE = platform.machine()  # another one's kernels add up in another order

PLAIN, RING = KVSpec(), KVSpec(window=24, keep=4, on_full="roll")
PACKED, PACKED_RING = KVSpec(key_bits=8, value_bits=4), KVSpec(window=40, keep="system", key_bits=8, on_full="roll")
ENGINES: dict[str, tuple[str, str, KVSpec]] = {
    f"{family} {dtype} {cache}": (family, dtype, kv)
    for family, dtype, cache, kv in (
        ("llama", "float16", "plain", PLAIN),
        ("llama", "float16", "ring", RING),
        ("llama", "float16", "packed", PACKED),
        ("llama", "float16", "packed ring", PACKED_RING),
        ("llama", "float32", "plain", PLAIN),
        ("llama", "float32", "packed ring", PACKED_RING),
        ("qwen3", "float16", "packed", PACKED),
        ("gemma3", "float16", "plain", PLAIN),
        ("gpt_oss", "float32", "ring", RING),
        ("mixtral", "float32", "plain", PLAIN),
        ("qwen3_5_text", "float16", "plain", PLAIN),
        ("minicpm3", "float16", "plain", PLAIN),
        ("gemma2", "float16", "packed", PACKED),
        ("guide", "float32", "plain", PLAIN),
    )
}
LENGTH = 20
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}
SAMPLINGS: dict[str, Sampling] = {
    "greedy": Sampling(temperature=0, max_tokens=LENGTH),
    "drawn": Sampling(
        temperature=0.9, seed=7, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1, max_tokens=LENGTH
    ),
    "penalised": Sampling(
        temperature=0.8,
        seed=3,
        min_p=0,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        max_tokens=LENGTH,
    ),
    "dry and xtc": Sampling(
        temperature=1, seed=5, min_p=0, repetition_penalty=1, dry_multiplier=0.8, xtc_probability=0.5, max_tokens=LENGTH
    ),
    "held back": Sampling(temperature=0, logit_bias={40: 3}, min_tokens=6, stop=("e",), max_tokens=LENGTH),
    "schema": Sampling(temperature=0.7, seed=2, min_p=0, repetition_penalty=1, json_schema=SCHEMA, max_tokens=LENGTH),
    "logprobs": Sampling(temperature=0, logprobs=2, max_tokens=8),
}
FIRST, SECOND = "What does a cache keep?", "Why?"


def built(family: str, folder: Path) -> Path | str:
    """Return the model's folder, made as a user would have it."""
    if family == "guide":
        return family
    stored = json.loads((HERE / family / "case.json").read_text())
    shutil.copy(HERE / family / "config.json", folder)
    for file in (HERE / "tokenizer").iterdir():
        shutil.copy(file, folder)
    write_weights(folder, stored["seed"], stored["shapes"], json.loads((folder / "config.json").read_text()))
    return folder


def replies(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield what an engine of this name replies, by the case: token ids, and a digest of all that its events say."""
    family, dtype, kv = ENGINES[name]
    with Engine.load(built(family, folder), dtype=dtype, kv=kv, speculation=None) as engine:
        for case, sampling in SAMPLINGS.items():
            if case != "schema" or family == "guide":  # no toy's tokenizer has what JSON is written with
                yield case, said(engine.generate([Message("user", FIRST)], sampling))
        chat = engine.chat(system="Brief.")
        greedy = replace(SAMPLINGS["greedy"], max_tokens=10)
        yield "first turn", said(chat.send(FIRST, greedy))
        yield "going on", said(chat.continue_reply(greedy))
        yield "second turn", said(chat.send(SECOND, greedy))
        yield "again", said(chat.regenerate(SAMPLINGS["drawn"]))
        yield (
            "other bits",
            said(engine.generate([Message("user", SECOND)], greedy, kv_bits=(8, 8)))
            if packs(engine, greedy)
            else "none",
        )
        together: dict[tuple[int, int], list[Event]] = {}
        for prompt, sample, event in engine.generate_many([FIRST, SECOND], SAMPLINGS["penalised"], n=2):
            assert isinstance(event, Event)
            together.setdefault((prompt, sample), []).append(event)
        for (prompt, sample), events in sorted(together.items()):
            yield f"together {prompt}.{sample}", said(iter(events))


def packs(engine: Engine, sampling: Sampling) -> bool:
    """Whether the model's keys and values can be packed."""
    try:
        list(engine.generate([Message("user", "?")], sampling, kv_bits=(8, 8)))
    except Exception:
        return False
    return True


def said(events: Iterator[Event]) -> str:
    """Return a reply's ids, why it ended, and a digest of its text and log-probabilities."""
    ids: list[int] = []
    rest: list[Any] = []
    for event in events:
        if isinstance(event, TextChunk | Finished):
            ids += event.ids
            rest += [(each.id, f"{each.logprob:.3f}", [other.id for other in each.top]) for each in event.logprobs]
        if isinstance(event, TextChunk):
            rest.append((event.text, event.kind))
        elif isinstance(event, Finished):
            rest.append((event.text, event.thinking, event.stopped_by))
            reason = event.reason
        elif isinstance(event, ToolCall):
            rest.append(event)
    digest = hashlib.sha256(repr(rest).encode()).hexdigest()[:12]
    return f"{' '.join(map(str, ids))} {reason} {digest}"


def write() -> None:
    found = {}
    for name in ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = dict(replies(name, Path(folder)))
    FILE.write_text(json.dumps({"machine": MACHINE, "replies": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
