"""Several replies to one prompt, written at once to be compared; afterwards they stand beside each other in the conversation."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tokamac.engine import metrics as rates
from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Finished, TextKind
from tokamac.engine.options import KVBits, Sampling, sample_of

from .. import units
from ..backend.protocol import ModelInfo
from ..options import kv_bits
from ..sanitise import sanitise_line
from ..settings_form import SAMPLING_FIELDS, whole_number, with_field
from .conversation import Conversation, Ending, Reply, ReplyBuilder, ReplyProgress, ReplySettings, ended_reply
from .preferences import chosen

LEAST, MOST = 2, 8
"""How many versions are written at once."""
SHARED = "written together: their speeds don't compare"
"""Each had a share of the machine, and the last one all of it."""
EXAMPLES = "/compare temperature 0 0.7 1.2, /compare kv-bits 16 8 4, /compare thinking on off"
"""Of what can be compared."""


class NoVariantsError(TokamacError):
    """What was asked for are no versions that can be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How one version is asked for.

    Attributes:
        name: what it differs in, such as ``temperature 0.7``, or its number where it differs in what chance draws.
        kv_bits: of keys and values; None: as the model was loaded.
        value: of the setting that is compared; "" where none is.
    """

    name: str
    settings: ReplySettings
    kv_bits: KVBits | None = None
    value: str = ""


class Version:
    """One of the replies: what it is asked for with, and how far it is.

    Attributes:
        id: of its request. key: of its message in the conversation.
        progress: how it is doing. reply: what it became; None while it is written.
        begun: whether it has said anything.
    """

    def __init__(self, id: int, key: int, variant: Variant) -> None:
        self.id, self.key, self.variant = id, key, variant
        self.progress = ReplyProgress()
        self.reply: Reply | None = None
        self.begun = False
        self._builder = ReplyBuilder()

    @property
    def so_far(self) -> Reply:
        """The reply as far as it came, or as it ended."""
        return self.reply or self._builder.so_far()

    @property
    def tps(self) -> float | None:
        """Tokens a second while it is written; None before there is a rate, and once it has ended."""
        live = self.progress.live
        return None if live is None or self.reply is not None else rates.recent_rate(live.gaps_ms)

    @property
    def state(self) -> str:
        """How it is doing, in a word or two: ``waiting``, ``reading 40%``, ``72 tok/s``, ``stopped``."""
        if self.reply is not None:
            brief = BRIEF_ENDINGS[self.reply.ending]
            metrics = self.reply.metrics
            rate = None if brief or metrics is None else metrics.decode_tps
            return brief or ("done" if rate is None else units.rate(rate))
        if (tps := self.tps) is not None:
            return units.rate(tps)
        prefill = self.progress.prefill
        if self.begun or (prefill is not None and prefill.done >= prefill.total):
            return "writing"
        return "waiting" if prefill is None else f"reading {units.percent(rates.share(prefill.done, prefill.total))}"

    def grow(self, text: str, kind: TextKind, now: float) -> None:
        """Add to the reply."""
        self.begun = True
        self._builder.add(text, kind, now)

    def end(self, ending: Ending, now: float, model: str, finished: Finished | None = None, reason: str = "") -> Reply:
        """Close the reply, as ``Conversation.end`` does."""
        reply = ended_reply(self._builder, self.progress, ending, now, model, finished, reason)
        self.reply = replace(reply, compared=self.variant.name if self.variant.value else "")
        return self.reply


BRIEF_ENDINGS: dict[Ending, str] = {
    "stop": "",
    "length": "cut off",
    "cancelled": "stopped",
    "lost": "lost",
    "failed": "failed",
    "tool_calls": "",
}


class Versions:
    """The versions that are written, or that were written last.

    Attributes:
        conversation: whose prompt they answer.
        all: in the order they were asked for.
        chosen: where in that order the one is that the conversation goes on from; None: nobody chose yet.
    """

    def __init__(self, conversation: Conversation, versions: Sequence[Version]) -> None:
        self.conversation = conversation
        self.all = tuple(versions)
        self.chosen: int | None = None

    @property
    def running(self) -> list[Version]:
        """Those that are still written."""
        return [each for each in self.all if each.reply is None]

    @property
    def tps(self) -> float | None:
        """Tokens a second of all that are written together; None while that is not known of any."""
        known = [each.tps for each in self.all if each.tps is not None]
        return sum(known) if known else None

    @property
    def kept(self) -> Version:
        """The version that the conversation goes on from: the chosen one, else the first that is whole, else the first."""
        if self.chosen is not None:
            return self.all[self.chosen]
        whole = (each for each in self.all if each.reply is not None and each.reply.ending in ("stop", "length"))
        return next(whole, self.all[0])

    @property
    def summary(self) -> str:
        """All of them in a line: ``4 versions · 96 tok/s together``, or when all have ended, ``4 versions · 41 s``."""
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
        """What their figures do not say, where something is compared; else ""."""
        return SHARED if any(each.variant.value for each in self.all) else ""

    @property
    def at_once(self) -> str:
        """How many are being written, and how fast together; "" where it is one or none."""
        width = len(self.running)
        if width < LEAST:
            return ""
        return f"{width} at once" + ("" if self.tps is None else f" · {units.rate(self.tps)} together")

    @property
    def _took(self) -> str:
        """How long all took, as far as it is known: they were asked for together."""
        metrics = (each.so_far.metrics for each in self.all)
        times = [each.total_s for each in metrics if each is not None and each.total_s is not None]
        return units.seconds(max(times)) if times else ""

    def heading(self, version: Version) -> str:
        """Return what stands above a version where they are listed: ``Version 2 of 4 · temperature 0.7``."""
        variant = version.variant
        place = f"Version {self.all.index(version) + 1} of {len(self.all)}"
        return f"{place} · {variant.name}" if variant.value else place

    def of(self, id: int) -> Version | None:
        """Return the version that request ``id`` asked for, if it is still written."""
        return next((each for each in self.running if each.id == id), None)


def samples(count: int, settings: ReplySettings, info: ModelInfo | None) -> list[Variant]:
    """Return ``count`` variants that differ in what chance draws. Raises NoVariantsError."""
    _check(count)
    recommended = Sampling() if info is None else info.recommended
    if settings.sampling.resolved(recommended).temperature == 0:
        raise NoVariantsError(
            f"At temperature 0, {count} versions would all be the same", "/compare temperature 0 0.5 1 varies it."
        )
    return [Variant(f"Version {at + 1}", _seeded(settings, at)) for at in range(count)]


def _seeded(settings: ReplySettings, at: int) -> ReplySettings:
    """A seed that the user set gives one text: each further version has the next seed."""
    return replace(settings, sampling=sample_of(settings.sampling, at))


def compared(text: str, settings: ReplySettings, info: ModelInfo | None) -> list[Variant]:
    """Return the variants that the argument of /compare asks for: a setting, and its values. Raises NoVariantsError."""
    name, *values = text.split()
    name = name.lower().replace("_", "-")
    if name == "thinking":
        values = values or ["on", "off"]
    distinct = list(dict.fromkeys(each.lower() for each in values))
    _check(len(distinct))
    return list(_variants(name, distinct, settings, info))


def _variants(name: str, values: Sequence[str], settings: ReplySettings, info: ModelInfo | None) -> Iterator[Variant]:
    field = NUMBERS.get(name)
    if field is None and name not in ("thinking", "kv", "kv-bits"):
        known = ", ".join(("kv-bits", "thinking", *NUMBERS))
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


NUMBERS = {each.name.replace("_", "-"): each for each in SAMPLING_FIELDS if each.read in (int, float)}
"""The sampling settings that are one number, by their names in /compare."""


def wanted(text: str) -> int | None:
    """Return how many versions the argument of /again asks for; None: one, as ever. Raises NoVariantsError."""
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
