"""Answers "what if" in the engine's process: arithmetic over shapes (perf/what_if.py), put into plain values.

On the engine's thread while that is free, a step at a time, so that no prompt waits for it long. Each kind of question has a thread
of its own: the catalogue takes seconds to weigh, and a table is asked for meanwhile. Of the questions of one kind that wait, the
last alone is answered.
"""

import queue
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar, get_args

from tokamac.engine.errors import TokamacError
from tokamac.engine.metrics import rate

from .outbox import Outbox
from .protocol import (
    Answer,
    AskWhatIf,
    CaseLine,
    Change,
    ChatCase,
    ChipLine,
    CurvePoint,
    Figures,
    ModelLine,
    Question,
    Roof,
    Spot,
    Wanted,
    Weighing,
    WhatIf,
    Where,
)

if TYPE_CHECKING:
    from tokamac.engine.perf.hardware import Chip
    from tokamac.engine.perf.inspection import Inspection, ModelRef, Prospect
    from tokamac.engine.perf.machine import Machine
    from tokamac.engine.perf.roofline import Phase, Prediction
    from tokamac.engine.perf.what_if import Suggestion, WhatIfCase, WhatIfOutcome


PhaseName = Literal["decode", "prefill"]
POINTS = 48
"""Contexts that a curve is drawn through."""


def answers(question: Question, limit: int | None = None) -> Iterator[Answer | Weighing]:
    """Yield the answer, before it how far it has come; each step is short. limit: bytes that may be used here; None is the
    system's.

    Raises TokamacError for a model or a chip that is not known, or a case that can't be.
    """
    match question.wanted:
        case "table":
            yield _table(question, limit)
        case "at once":
            yield _at_once(question, limit)
        case "guesses":
            yield _guesses(question, limit)
        case "cache":
            yield _cache(question, limit)
        case "chips":
            yield _chips(question)
        case "models":
            yield from _weigh_catalogue(question, limit)
        case "disk":
            yield from _weigh_disk(question, limit)


def _weigh_catalogue(question: Question, limit: int | None) -> Iterator[Answer | Weighing]:
    """Weigh the catalogue, a model a step: the last yields the answer. Raises OptionError for a chip that is not in the table."""
    from tokamac.engine.perf.machine import here
    from tokamac.engine.perf.what_if import WhatIfCase, rank, repositories, suggestion

    place = _place(question.where) or here(limit=limit)
    case, asked, found = WhatIfCase(context=question.context, prompt=question.prompt), list(repositories()), []
    for entry, repository in asked:
        found.append(suggestion(entry, repository, case, place))
        yield Weighing(len(found), len(asked), model_line(found[-1]))
    models = tuple(map(model_line, sorted(found, key=rank)))
    yield Answer("", place.chip.label, place.budget_rule or "", models=models)


def _weigh_disk(question: Question, limit: int | None) -> Iterator[Answer | Weighing]:
    """Weigh the models that are named, one a step. What can't be weighed is unknown. Raises OptionError like the above."""
    from tokamac.engine.perf.inspection import prospect
    from tokamac.engine.perf.machine import here

    place, case, found = _place(question.where) or here(limit=limit), case_of(question), []
    for name in question.names:
        found.append(_prospect(prospect(name, case, place)))
        yield Weighing(len(found), len(question.names), found[-1])
    yield Answer("", place.chip.label, place.budget_rule or "", models=tuple(found))


def _table(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.perf.what_if import curve, notes, table

    case, found, subject = _inspected(question, limit)
    outcomes = table(subject.config, case, found.place, own=subject.packing)
    last = max(found.context_length or 0, case.context)
    contexts = sorted({max(1, round(last * step / POINTS)) for step in range(POINTS + 1)})
    points = curve(subject.config, case, found.place, contexts, own=subject.packing)
    return Answer(
        model=found.model,
        place=found.place.chip.label,
        rule=found.place.budget_rule or "",
        context_length=found.context_length,
        cases=(*_now(question.now, subject, found.place), *(_case(each, case) for each in outcomes)),
        curve=tuple(CurvePoint(each.context, each.ceiling_tps, each.expected_tps) for each in points),
        roof=None if found.prediction is None else _roof(found.prediction, found.place.chip),
        notes=notes(outcomes),
    )


def _now(chat: ChatCase | None, subject: "ModelRef", place: "Machine") -> Iterator[CaseLine]:
    """Yield the chat's own case, reckoned as the engine reckons the ceiling of its replies."""
    from tokamac.engine.perf.what_if import WhatIfCase, outcome

    if chat is not None:
        case = WhatIfCase(kv=chat.kv, context=chat.context, prompt=chat.prompt)
        yield replace(_case(outcome(subject.config, case, place, own=subject.packing), case), change="as now")


def _chips(question: Question) -> Answer:
    from tokamac.engine.perf.inspection import model_ref
    from tokamac.engine.perf.machine import everywhere
    from tokamac.engine.perf.what_if import on_chips

    subject = model_ref(question.model)
    outcomes = on_chips(subject.config, case_of(question), everywhere(question.where.memory_gb), own=subject.packing)
    return Answer(subject.name, "every chip of the table", chips=tuple(map(_chip, outcomes)))


def _cache(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.errors import OptionError
    from tokamac.engine.passes.without_cache import cache_worth
    from tokamac.engine.perf.footprint import weigh
    from tokamac.engine.perf.what_if import contexts_up_to

    case, found, subject = _inspected(question, limit)
    place, packing = found.place, case.packing(subject.packing)
    weighed = weigh(subject.config, place.device, packing=packing)
    if isinstance(weighed, str):
        raise OptionError(weighed, "Choose another model.")
    worth = cache_worth(weighed, case, place, contexts_up_to(subject.config))
    return Answer(found.model, place.chip.label, place.budget_rule or "", found.context_length, cache=worth)


def _at_once(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.schedule.capacity import capacity_of

    case, found, subject = _inspected(question, limit)
    place = found.place
    several = capacity_of(subject.config, case, place, own=subject.packing)
    rule, notes = place.budget_rule or "", several.notes
    return Answer(found.model, place.chip.label, rule, found.context_length, notes=notes, at_once=several)


def _guesses(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.perf.catalogue import draft_for
    from tokamac.engine.perf.inspection import model_ref
    from tokamac.engine.speculation.gain import gain_of

    case, found, subject = _inspected(question, limit)
    known = None if question.draft else draft_for(question.model)
    name = question.draft or (known.id if known is not None else "")
    gained = gain_of(subject, case, found.place, question.acceptance, model_ref(name) if name else None)
    rule, notes = found.place.budget_rule or "", gained.notes
    return Answer(found.model, found.place.chip.label, rule, found.context_length, notes=notes, guesses=gained)


def _inspected(question: Question, limit: int | None) -> "tuple[WhatIfCase, Inspection, ModelRef]":
    from tokamac.engine.perf.inspection import inspect, model_ref
    from tokamac.engine.perf.machine import here

    subject, case = model_ref(question.model), case_of(question)
    place = _place(question.where) or (None if limit is None else here(limit=limit))
    return case, inspect(subject, case, place), subject


def case_of(question: Question) -> "WhatIfCase":
    """Return the case that is asked about. Raises OptionError for one that can't be."""
    from tokamac.engine.perf.what_if import WhatIfCase

    return WhatIfCase(question.bits, 64, question.kv, question.context, question.prompt)


def _place(where: Where) -> "Machine | None":
    from tokamac.engine.perf.machine import elsewhere

    return elsewhere(where.chip, where.gpu_cores, where.memory_gb) if where.chip else None


def _case(found: "WhatIfOutcome", base: "WhatIfCase") -> CaseLine:
    case = found.case
    return CaseLine(_change(case, base), case.bits, case.kv.key_bits, case.kv.value_bits, case.context, _figures(found))


def _change(case: "WhatIfCase", base: "WhatIfCase") -> Change:
    if case.bits != base.bits:
        return "weights"
    if case.kv != base.kv:
        return "keys and values"
    return "context" if case.context != base.context else "as asked"


def _figures(found: "WhatIfOutcome") -> Figures:
    memory = found.memory
    return Figures(
        memory_bytes=None if memory is None else memory.total,
        budget_bytes=None if memory is None else memory.budget,
        fits=None if memory is None else memory.fits,
        ceiling_tps=found.ceiling_tps,
        expected_tps=found.expected_tps,
        ttft_s=found.ttft_s,
        reason=found.reason or "",
        from_others=0 if memory is None else memory.from_others,
    )


def _chip(found: "WhatIfOutcome") -> ChipLine:
    chip = found.place.chip
    return ChipLine(chip.label, chip.bandwidth_gbs, _figures(found))


def model_line(found: "Suggestion") -> ModelLine:
    """Return a suggestion in plain values."""
    return _line(found.id, found.download_bytes, found)


def _prospect(found: "Prospect") -> ModelLine:
    return replace(_line(found.model, None, found), text_only=found.text_only)


def _line(model: str, download_bytes: int | None, found: "Suggestion | Prospect") -> ModelLine:
    from tokamac.engine.perf.what_if import group_of

    outcome = found.outcome
    return ModelLine(
        model=model,
        download_bytes=download_bytes,
        parameters=found.parameters,
        active_parameters=found.active_parameters,
        verdict=found.verdict,
        figures=replace(_figures(outcome), reason=found.reason),
        bits_per_weight=outcome.bits_per_weight,
        context=outcome.case.context,
        group=group_of(outcome),
    )


def _roof(predicted: "Prediction", chip: "Chip") -> Roof | None:
    """Return the roofline; None where one of its roofs is not known."""
    if chip.bandwidth_gbs is None or predicted.ridge is None:
        return None
    spots = tuple(_spots(predicted))
    return Roof(chip.bandwidth_gbs, predicted.ridge * chip.bandwidth_gbs / 1e3, predicted.ridge, spots)


def _spots(predicted: "Prediction") -> Iterator[Spot]:
    phases: Sequence[tuple[PhaseName, Phase]] = (("decode", predicted.decode), ("prefill", predicted.prefill))
    for name, phase in phases:
        if phase.intensity is not None:
            both = (_tflops(phase, phase.ceiling_s), _tflops(phase, phase.expected_s))
            yield Spot(name, phase.intensity, "host" if phase.by_host else phase.bound, *both)


def _tflops(phase: "Phase", seconds: float | None) -> float | None:
    per_second = None if phase.operations is None else rate(phase.operations, seconds)
    return None if per_second is None else per_second / 1e12


T = TypeVar("T")


class Between(Protocol):
    """Runs work where MLX may be touched, once nothing else does."""

    def __call__(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns."""


class Advisor:
    """Answers ``AskWhatIf``. limit: bytes that may be used of this machine; None is the system's limit."""

    def __init__(self, outbox: Outbox) -> None:
        self.limit: int | None = None
        self._kinds: dict[Wanted, _Kind] = {wanted: _Kind(wanted, outbox) for wanted in get_args(Wanted)}

    def ask(self, between: Between, request: AskWhatIf) -> None:
        """Have ``request`` answered. Returns at once."""
        self._kinds[request.question.wanted].ask(between, request, self.limit)

    def close(self) -> None:
        """End the threads; nobody waits for an answer any more."""
        for kind in self._kinds.values():
            kind.close()


class _Kind:
    """A thread that answers questions of one kind."""

    def __init__(self, wanted: Wanted, outbox: Outbox) -> None:
        self._outbox = outbox
        self._latest: AskWhatIf | None = None
        self._asked: queue.SimpleQueue[tuple[Between, AskWhatIf, int | None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"advisor-{wanted}", daemon=True).start()

    def ask(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        self._latest = request
        self._asked.put((between, request, limit))

    def close(self) -> None:
        self._latest = None
        self._asked.put(None)

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._answer(*asked)

    def _answer(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        try:
            self._tell(between, request, limit)
        except TokamacError as error:
            self._outbox.put(WhatIf(request.id, None, error.one_line()))
        except Exception as error:  # a config may hold anything: it must not end this thread
            traceback.print_exc()
            why = f"The comparison failed: {type(error).__name__}. The log has the details."
            self._outbox.put(WhatIf(request.id, None, why))

    def _tell(self, between: Between, request: AskWhatIf, limit: int | None) -> None:
        """Send the answer, and before it how far it has come; nothing more once a later question is there."""
        left = answers(request.question, limit)
        while self._latest is request:
            match between(lambda: next(left)):
                case Weighing(done, total, line):
                    self._outbox.put(WhatIf(request.id, None, done=done, total=total, line=line))
                case Answer() as found:
                    self._outbox.put(WhatIf(request.id, found))
                    return
