"""How models would run on this machine, and which one to start with.

It is asked of the engine's process; the answers come one model at a time. A question that another of its kind displaced (what-if
asks for the catalogue too), or whose process is gone, is asked again when the estimates are next wanted.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tokamac.engine.options import KVSpec

from .. import units
from ..backend.protocol import Group, ModelLine, Question, WhatIf

START_TPS = 15.0
"""Tokens a second that the model to start with is expected to reach, at least: three times as fast as people read."""

ASSUMED_BPS = 100e6 / 8
"""Bytes a second of a connection of 100 Mbit/s, where no download was measured here."""

Grounds = Literal["expected speed", "limit", "size"]
"""What a choice rests on: the expected speed; the hardware limit, where no speed is expected; the size, where neither is known."""


@dataclass(frozen=True, slots=True)
class StartHere:
    """The one model to start with on a machine. None is unknown.

    Attributes:
        ceiling_tps: what the hardware allows, at most.
        download_s: seconds to download it at ``download_bps``, else at 100 Mbit/s.
        download_bps: bytes a second of the last download here.
    """

    model: str
    download_bytes: int | None
    expected_tps: float | None
    ceiling_tps: float | None
    download_s: float | None
    download_bps: float | None
    grounds: Grounds

    @property
    def facts(self) -> str:
        """Size, speed and time in one line: ``2.28 GB · about 62 tok/s · at 100 Mbit/s about 3 min to download``."""
        return " · ".join((units.size(self.download_bytes), self.speed, self.wait))

    @property
    def speed(self) -> str:
        """How fast it is here, in words."""
        if self.expected_tps is not None:
            return f"about {self.expected_tps:.0f} tok/s"
        unmeasured = "speed not measured yet"
        return unmeasured if self.ceiling_tps is None else f"{unmeasured}, at most {units.rate(self.ceiling_tps)}"

    @property
    def wait(self) -> str:
        """How long the download takes, in words."""
        if self.download_s is None:
            return "download time unknown"
        takes = f"about {units.minutes(self.download_s)} to download".replace("about under", "under")
        return takes if self.download_bps else f"at 100 Mbit/s {takes}"


@dataclass(frozen=True, slots=True)
class ModelAdvice:
    """Models of one machine in their groups, each group best first.

    Attributes:
        start: the one to start with; it leads its group, too.
        lines: all of them, group after group.
        note: what the choice rests on, or why there is none; "" where there is nothing to add.
    """

    start: StartHere | None
    lines: tuple[ModelLine, ...]
    note: str = ""

    def of(self, group: Group) -> tuple[ModelLine, ...]:
        """Return the models of a group."""
        return tuple(line for line in self.lines if line.group == group)


def advise(lines: Iterable[ModelLine], download_bps: float | None = None) -> ModelAdvice:
    """Return models in groups, and the one to start with.

    Only a speed that is expected here recommends a model. Where none is expected of any, the choice rests on the hardware limit,
    or on the size alone, and ``note`` says so.

    Args:
        lines: models to download, as they would run on one machine, ranked (``rank`` in engine/perf/what_if.py).
        download_bps: bytes a second of the last download here; None is unknown.
    """
    ranked = sorted(lines, key=lambda line: get_args(Group).index(line.group))
    chosen, grounds, note = _first_choice(ranked)
    if chosen is None:
        return ModelAdvice(None, tuple(ranked), note)
    nbytes, figures = chosen.download_bytes, chosen.figures
    wait_s = None if nbytes is None else nbytes / (download_bps or ASSUMED_BPS)
    start = StartHere(chosen.model, nbytes, figures.expected_tps, figures.ceiling_tps, wait_s, download_bps, grounds)
    return ModelAdvice(start, tuple(ranked), note)


def _first_choice(ranked: Sequence[ModelLine]) -> tuple[ModelLine | None, Grounds, str]:
    """Return the model to start with, what it was chosen by, and a note on that."""
    recommended = [line for line in ranked if line.group == "recommended"]
    if recommended:
        quick = [line for line in recommended if (line.figures.expected_tps or 0.0) >= START_TPS]
        if quick:
            return quick[0], "expected speed", ""
        fastest = max(recommended, key=lambda line: line.figures.expected_tps or 0.0).figures.expected_tps
        note = f"No model is expected to reach {START_TPS:.0f} tok/s here; the fastest manages {units.rate(fastest)}."
        return None, "expected speed", note
    untimed = [line for line in ranked if line.group == "speed unknown"]
    if not untimed:
        unsure = any(line.group == "fit unknown" for line in ranked)
        note = "whether it fits is not known" if unsure else "none that fits is fast enough here"
        return None, "size", f"No model is recommended: {note}."
    bounded = [line for line in untimed if line.figures.ceiling_tps is not None]
    if not bounded:
        return untimed[0], "size", "This machine's speed has not been measured yet, so the smallest models come first."
    able = [line for line in bounded if (line.figures.ceiling_tps or 0.0) >= 2 * START_TPS]
    if not able:
        note = f"By this machine's memory speed no model here is sure to reach {START_TPS:.0f} tok/s; the smallest come nearest."
        return None, "limit", note
    return able[0], "limit", "Speeds have not been measured here yet; this one is chosen by what the hardware allows."


CONTEXT = 8192
"""Tokens of context that estimates are for: a long conversation, or a long file."""


class Estimates:
    """Asks by ``ask``, which returns the number that the answers will have. Attributes are for reading.

    download_bps: returns the bytes a second of the last download.

    Attributes:
        disk, catalogue: what is known, by model.
        advice: the catalogue in groups, and the model to start with; None while it is being estimated.
        place, rule: the machine, and where its memory budget comes from.
        progress: how many of how many of the catalogue are estimated.
        problem: why there is no answer.
    """

    def __init__(self, ask: Callable[[Question], int], download_bps: Callable[[], float | None] = lambda: None) -> None:
        self._ask = ask
        self._download_bps = download_bps
        self._asked: dict[str, int] = {}
        self._kv: KVSpec | None = None
        self._limit: int | None = None
        self.disk: dict[str, ModelLine] = {}
        self.catalogue: dict[str, ModelLine] = {}
        self.advice: ModelAdvice | None = None
        self.place = ""
        self.rule = ""
        self.progress = (0, 0)
        self.problem = ""

    def want(self, names: Sequence[str], kv: KVSpec, limit: int | None = None) -> None:
        """Ask for what is not known yet of the catalogue, and of the models on disk ``names``, with these KV settings.

        limit: bytes that a model may take, where the user set them.
        """
        if limit != self._limit:
            self._limit, self.advice = limit, None
            for known in (self.disk, self.catalogue, self._asked):
                known.clear()
        if kv != self._kv:
            self._kv = kv
            self.disk.clear()
            self._asked.pop("disk", None)
        unknown = tuple(name for name in names if name not in self.disk)
        if unknown and "disk" not in self._asked:
            question = Question("disk", "", kv=kv, context=CONTEXT, prompt=CONTEXT, names=unknown)
            self._asked["disk"] = self._ask(question)
        if self.advice is None and "models" not in self._asked:
            self._asked["models"] = self._ask(Question("models", "", context=CONTEXT, prompt=CONTEXT))

    def again(self) -> None:
        """Forget what was asked: the process is another, or was asked for something else."""
        self._asked.clear()

    def forget(self, model: str) -> None:
        """Forget the estimate of ``model``, whose files have changed."""
        self.disk.pop(model, None)

    def take(self, event: WhatIf) -> bool:
        """Take an answer, or part of one; return whether it was asked for here."""
        wanted = next((wanted for wanted, number in self._asked.items() if number == event.id), None)
        if wanted is None:
            return False
        if event.line is not None:
            (self.disk if wanted == "disk" else self.catalogue)[event.line.model] = event.line
        if event.answer is not None or event.error:
            del self._asked[wanted]
            self.problem = event.error
        if event.answer is not None:
            self.place, self.rule = event.answer.place, event.answer.rule
        if wanted == "models":
            self.progress = (event.done, event.total)
            if event.answer is not None:
                self.advice = advise(event.answer.models, self._download_bps())
        return True
