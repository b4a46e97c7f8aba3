"""``tokamac doctor --answers``: whether an update left a model's answers as they were."""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import TokamacError
from tokamac.engine.files import atomic_write, read_bytes
from tokamac.engine.options import KVSpec, Sampling

from .. import settings
from ..store.database import default_path
from ..store.store import Questions
from ..store.values import StoreError
from ..text.sanitise import sanitise_line
from ..text.strict_json import ShapeError, build
from ..text.terminal import Progress, json_line, note
from ..text.units import count
from . import loading

if TYPE_CHECKING:
    from tokamac.engine import Engine

MOST, TOKENS, LONGEST = 40, 32, 2000  # prompts; tokens of an answer; characters of a prompt
LIMIT = 4 << 20  # bytes of a record: 40 prompts and answers take a twentieth
SHOWN = 3  # answers that differ, shown whole
PACKAGES = ("mlx", "mlx-lm", "tokamac")

# For whoever has asked little yet.
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that reverses a list.",
    "Explain in two sentences why the sky is blue.",
    "Translate into German: the train leaves at seven.",
    "List three uses of an old newspaper.",
    "What is 17 times 23?",
    "Name the planets from the sun outwards.",
    "Write a haiku about rain.",
)


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """A greedy answer: its tokens, and the log-probability of each, in nats."""

    prompt: str
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """date: of the day, UTC. versions: by package."""

    model: str
    date: str
    versions: tuple[tuple[str, str], ...]
    answers: tuple[KeptAnswer, ...]


def run(options: argparse.Namespace, versions: tuple[tuple[str, str], ...]) -> int:
    """Answer again what was answered before, or for the first time; 1 where an answer differs. Raises TokamacError."""
    model = options.model or settings.load(settings.default_path()).settings.model
    plain = argparse.Namespace(memory=None, adapter=None, cpu_exact=False)
    with loading.load(plain, model, KVSpec()) as engine:
        file = _file(loading.on_disk(model))
        before = None if options.answers == "renew" else _read(file)
        prompts = [each.prompt for each in before.answers] if before else _prompts()
        now = Fingerprint(sanitise_line(model), datetime.now(UTC).date().isoformat(), versions, _ask(engine, prompts))
    if before is None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_write(file) as written:
            written.write(json.dumps(asdict(now)).encode())
    return _tell(before, now, json=options.json)


def _file(folder: Path) -> Path:
    from tokamac.engine.model.safetensors import find_shards
    from tokamac.engine.prompt_cache.folder import default_root, digest

    return default_path().parent / "answers" / f"{digest(find_shards(folder), default_root())}.json"


def _read(file: Path) -> Fingerprint | None:
    try:
        found: Fingerprint = build(Fingerprint, json.loads(read_bytes(file, LIMIT)), "record")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, ShapeError) as error:
        raise TokamacError(
            f"the answers kept in {file} can't be read: {error}", "tokamac doctor --answers renew keeps new ones."
        ) from error
    return found


def _prompts() -> list[str]:
    """Return what was asked last in kept chats, short enough, then prompts of our own."""
    try:
        with closing(Questions.open_to_read(default_path())) as store:
            asked = store.history(4 * MOST)
    except StoreError:
        asked = []
    own = [each for each in asked if len(each) <= LONGEST and not each.startswith("/")]
    return list(dict.fromkeys([*own, *PROMPTS]))[:MOST]


def _ask(engine: "Engine", prompts: Sequence[str]) -> tuple[KeptAnswer, ...]:
    bar, found = Progress("answering", unit="prompts"), list[KeptAnswer]()
    try:
        for prompt in prompts:
            reply = engine.ask(prompt, Sampling(temperature=0, max_tokens=TOKENS, logprobs=0))
            scores = tuple(round(each.logprob, 6) for each in reply.logprobs)
            found.append(KeptAnswer(prompt, reply.text, reply.ids, scores))
            bar.update(len(found), len(prompts))
    finally:
        bar.clear()
    return tuple(found)


def differing(before: Fingerprint, now: Fingerprint) -> list[tuple[KeptAnswer, KeptAnswer]]:
    """Return pairs of answers with other tokens."""
    return [pair for pair in zip(before.answers, now.answers, strict=True) if pair[0].ids != pair[1].ids]


def moved(before: Fingerprint, now: Fingerprint) -> float:
    """Return the largest change of a log-probability, in nats, up to the first token that differs."""
    return max(
        (
            abs(a - b)
            for one, other in zip(before.answers, now.answers, strict=True)
            for a, b, x, y in zip(one.logprobs, other.logprobs, one.ids, other.ids, strict=False)
            if x == y
        ),
        default=0.0,
    )


def _tell(before: Fingerprint | None, now: Fingerprint, *, json: bool) -> int:
    found = [] if before is None else differing(before, now)
    old = {} if before is None else dict(before.versions)
    changed = [f"{name} {old[name]} → {new}" for name, new in now.versions if old.get(name, new) != new]
    if json:
        json_line(
            {
                "event": "answers", "model": now.model, "since": None if before is None else before.date,
                "prompts": len(now.answers), "updates": changed, "largest_change": None if before is None else moved(before, now),
                "differ": [{"prompt": one.prompt, "before": one.text, "now": other.text} for one, other in found],
            }
        )  # fmt: skip
    elif before is None:
        print(
            f"Kept {now.model}'s answers to {count(len(now.answers))} prompts. After an update, the same command compares."
        )
    else:
        since = " ".join([before.date, *([f"({', '.join(changed)})"] if changed else [])])
        if not found:
            print(f"Same answers as on {since} to your {count(len(now.answers))} prompts.")
        else:
            print(f"{count(len(found))} of {count(len(now.answers))} answers differ from {since}.")
        print(f"Largest change of a log-probability: {moved(before, now):.2g} nats.")
        for one, other in found[:SHOWN]:
            print(
                f"\n{sanitise_line(one.prompt)[:70]}\n  before: {sanitise_line(one.text)}\n  now:    {sanitise_line(other.text)}"
            )
    if found and not json:
        note("tokamac: `tokamac doctor --answers renew` keeps the new ones.")
    return 1 if found else 0
