"""Parallel versions of a reply, to compare; they stay as siblings in the conversation."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tokamac.engine import metrics as rates
from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Finished, ModelSpec, TextKind
from tokamac.engine.options import KVBits, Sampling, sample_of

from ..backend.protocol import Load
from ..models.local import short_name
from ..options import kv_bits
from ..text import units
from ..text.sanitise import sanitise_line
from .conversation import Conversation, Ending, Reply, ReplyBuilder, ReplyProgress, ReplySettings, ended_reply
from .preferences import chosen
from .settings_form import SAMPLING_FIELDS, whole_number, with_field

LEAST, MOST = 2, 8  # how many versions are written at once
# Each had a share of the machine, and the last one all of it.
SHARED = "written together: their speeds can't be compared"
# Of what can be compared.
EXAMPLES = "/compare temperature 0 0.7 1.2, /compare kv-bits 16 8 4, /compare model qwen3:4b llama3.2:3b"


class NoVariantsError(TokamacError):
    """The requested versions can't be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How one version is requested.

    Attributes:
        name: the difference, such as ``temperature 0.7``; a number for samples.
        kv_bits: None: as loaded.
        value: of the compared setting; "" if none.
        load: the model that writes it; None: the one that is loaded.
    """

    name: str
    settings: ReplySettings
    kv_bits: KVBits | None = None
    value: str = ""
    load: Load | None = None


class Version:
    """One version. id: request; key: message; reply: None while running; begun: it has text."""

    def __init__(self, id: int, key: int, variant: Variant) -> None:
        self.id, self.key, self.variant = id, key, variant
        self.progress = ReplyProgress()
        self.reply: Reply | None = None
        self.begun = False
        self._builder = ReplyBuilder()

    @property
    def so_far(self) -> Reply:
        return self.reply or self._builder.so_far()

    @property
    def tps(self) -> float | None:
        """Tokens/s while running; None before there is a rate, and at the end."""
        live = self.progress.live
        return None if live is None or self.reply is not None else live.metrics.shown_decode_tps

    @property
    def state(self) -> str:
        """``waiting``, ``reading 40%``, ``72 tok/s``, ``stopped``."""
        if self.reply is not None:
            brief = BRIEF_ENDINGS[self.reply.ending]
            metrics = self.reply.metrics
            rate = None if brief or metrics is None else metrics.shown_decode_tps
            said = brief or ("done" if rate is None else units.rate(rate))
            if self.variant.load is None or metrics is None or metrics.peak_memory_bytes is None:
                return said
            return f"{said}, {units.size(metrics.peak_memory_bytes)}"
        if (tps := self.tps) is not None:
            return units.rate(tps)
        prefill = self.progress.prefill
        if self.begun or (prefill is not None and prefill.done >= prefill.total):
            return "writing"
        return "waiting" if prefill is None else f"reading {units.percent(rates.share(prefill.done, prefill.total))}"

    def grow(self, text: str, kind: TextKind, now: float) -> None:
        self.begun = True
        self._builder.add(text, kind, now)

    def end(self, ending: Ending, now: float, model: str, finished: Finished | None = None, reason: str = "") -> Reply:
        reply = ended_reply(self._builder, self.progress, ending, now, model, finished, reason)
        self.reply = replace(reply, compared=self.variant.name if self.variant.value else "")
        return self.reply


BRIEF_ENDINGS: dict[Ending, str] = {
    "stop": "",
    "length": "cut off",
    "full": "context full",
    "loop": "repeats itself",
    "cancelled": "stopped",
    "lost": "lost",
    "failed": "failed",
    "tool_calls": "",
}


class Versions:
    """The running or last versions, in request order. chosen: index to continue from; None: not chosen yet."""

    def __init__(self, conversation: Conversation, versions: Sequence[Version]) -> None:
        self.conversation = conversation
        self.all = tuple(versions)
        self.chosen: int | None = None

    @property
    def running(self) -> list[Version]:
        return [each for each in self.all if each.reply is None]

    @property
    def tps(self) -> float | None:
        """Joint tokens/s of running versions; None if unknown for all."""
        known = [each.tps for each in self.all if each.tps is not None]
        return sum(known) if known else None

    @property
    def kept(self) -> Version:
        if self.chosen is not None:
            return self.all[self.chosen]
        whole = (each for each in self.all if each.reply is not None and each.reply.ending in ("stop", "length"))
        return next(whole, self.all[0])

    @property
    def summary(self) -> str:
        """``4 versions · 96 tok/s together``, or at the end ``4 versions · 41 s``."""
        running = self.running
        parts = [f"{len(self.all)} versions"]
        if not running:
            parts.append(self._took)
        else:
            ended, unread = len(self.all) - len(running), sum(not each.begun for each in running)
            parts.append(f"{ended} done" if ended else "")
            if unread == len(running):
                parts.append("reading the prompt")
            else:
                parts.append("writing" if self.tps is None else f"{units.rate(self.tps)} together")
                parts.append(f"{unread} not begun" if unread else "")
        return " · ".join(part for part in parts if part)

    @property
    def caution(self) -> str:
        """A caveat on the figures of a comparison, or ""."""
        return SHARED if any(each.variant.value and each.variant.load is None for each in self.all) else ""

    @property
    def at_once(self) -> str:
        width = len(self.running)
        if width < LEAST or self.all[0].variant.load is not None:
            return ""
        return f"{width} at once" + ("" if self.tps is None else f" · {units.rate(self.tps)} together")

    @property
    def _took(self) -> str:
        """How long all took, if known; they were requested together."""
        metrics = (each.so_far.metrics for each in self.all)
        times = [each.total_s for each in metrics if each is not None and each.total_s is not None]
        return units.seconds(max(times)) if times else ""

    def heading(self, version: Version) -> str:
        """Return a heading: ``Version 2 of 4 · temperature 0.7``."""
        variant = version.variant
        place = f"Version {self.all.index(version) + 1} of {len(self.all)}"
        return f"{place} · {variant.name}" if variant.value else place

    def find(self, id: int) -> Version | None:
        return next((each for each in self.running if each.id == id), None)


def samples(count: int, settings: ReplySettings, info: ModelSpec | None) -> list[Variant]:
    """Return ``count`` variants that differ by seed. Raises NoVariantsError."""
    _check(count)
    recommended = Sampling() if info is None else info.recommended
    if settings.sampling.resolved(recommended).temperature == 0:
        raise NoVariantsError(
            f"At temperature 0, {count} versions would all be the same", "/compare temperature 0 0.5 1 varies it."
        )
    return [Variant(f"Version {at + 1}", _seeded(settings, at)) for at in range(count)]


def _seeded(settings: ReplySettings, at: int) -> ReplySettings:
    return replace(settings, sampling=sample_of(settings.sampling, at))


def compared(text: str, settings: ReplySettings, info: ModelSpec | None) -> list[Variant]:
    """Parse /compare: a setting and its values. Raises NoVariantsError."""
    name, *values = text.split()
    name = name.lower().replace("_", "-")
    if name == "thinking":
        values = values or ["on", "off"]
    distinct = list(dict.fromkeys(each.lower() for each in values))
    _check(len(distinct))
    return list(_variants(name, distinct, settings, info))


def of_models(loads: Sequence[Load], settings: ReplySettings) -> list[Variant]:
    """Return a variant a model; they are written one after the other. Raises NoVariantsError."""
    _check(len(loads))
    names = [short_name(each.model) for each in loads]
    shown = names if len(set(names)) == len(names) else [sanitise_line(each.model) for each in loads]
    return [Variant(name, settings, value=name, load=load) for name, load in zip(shown, loads, strict=True)]


def _variants(name: str, values: Sequence[str], settings: ReplySettings, info: ModelSpec | None) -> Iterator[Variant]:
    field = NUMBERS.get(name)
    if field is None and name not in ("thinking", "kv", "kv-bits"):
        known = ", ".join(("model", "kv-bits", "thinking", *NUMBERS))
        raise NoVariantsError(f"{sanitise_line(name):.40} can't be compared", f"These can: {known}.")
    for value in values:
        shown = sanitise_line(value)
        try:
            if name == "thinking":
                yield Variant(
                    f"thinking {shown}", replace(settings, template=chosen(value, settings.template, info)), value=shown
                )
            elif field is None:
                yield Variant(f"KV {shown} bits", settings, kv_bits(value), shown)
            else:
                sampling = with_field(settings.sampling, field, value)
                yield Variant(f"{field.label.lower()} {shown}", replace(settings, sampling=sampling), value=shown)
        except argparse.ArgumentTypeError as error:
            raise NoVariantsError(str(error)) from error


# The sampling settings that are one number, by their names in /compare.
NUMBERS = {each.name.replace("_", "-"): each for each in SAMPLING_FIELDS if each.read in (int, float)}


def wanted(text: str) -> int | None:
    """Parse the count of /again; None: one. Raises NoVariantsError."""
    if not text:
        return None
    if (count := whole_number(text)) is None:
        raise NoVariantsError(f"{sanitise_line(text):.40} is not a number of versions", "/again 4 writes four at once.")
    if count == 1:
        return None
    _check(count)
    return count


def _check(count: int) -> None:
    if not LEAST <= count <= MOST:
        raise NoVariantsError(
            f"{LEAST} to {MOST} versions are written at once, not {count}", f"For example: {EXAMPLES}."
        )
