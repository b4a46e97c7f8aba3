"""Answers "what if" in the engine's process: arithmetic over shapes (limits/whatif.py), put into plain values."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from tokamac.app.backend.whatif import (
    Answer,
    CaseLine,
    Change,
    ChipLine,
    CurvePoint,
    Figures,
    ModelLine,
    Question,
    Roof,
    Spot,
    Weighing,
    Where,
)
from tokamac.engine.limits.metrics import rate

if TYPE_CHECKING:
    from tokamac.engine.limits.hardware import Chip
    from tokamac.engine.limits.inspect import Inspection
    from tokamac.engine.limits.outcomes import Case, Outcome
    from tokamac.engine.limits.places import Place
    from tokamac.engine.limits.prediction import Phase, Prediction
    from tokamac.engine.limits.prospects import Prospect
    from tokamac.engine.limits.subject import Subject
    from tokamac.engine.limits.suggest import Suggestion

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
        case "chips":
            yield _chips(question)
        case "models":
            yield from _weigh_catalogue(question, limit)
        case "disk":
            yield from _weigh_disk(question, limit)


def _weigh_catalogue(question: Question, limit: int | None) -> Iterator[Answer | Weighing]:
    """Weigh the catalogue, a model a step: the last yields the answer. Raises OptionError for a chip that is not in the table."""
    from tokamac.engine.limits.outcomes import Case
    from tokamac.engine.limits.places import here
    from tokamac.engine.limits.suggest import rank, repositories, suggestion

    place = _place(question.where) or here(limit=limit)
    case, asked, found = Case(context=question.context, prompt=question.prompt), list(repositories()), []
    for entry, repository in asked:
        found.append(suggestion(entry, repository, case, place))
        yield Weighing(len(found), len(asked), _model(found[-1]))
    models = tuple(map(_model, sorted(found, key=rank)))
    yield Answer("", chip_name(place.chip), place.budget_rule or "", models=models)


def _weigh_disk(question: Question, limit: int | None) -> Iterator[Answer | Weighing]:
    """Weigh the models that are named, one a step. What can't be weighed is unknown. Raises OptionError like the above."""
    from tokamac.engine.limits.places import here
    from tokamac.engine.limits.prospects import prospect

    place, case, found = _place(question.where) or here(limit=limit), case_of(question), []
    for name in question.names:
        found.append(_prospect(prospect(name, case, place)))
        yield Weighing(len(found), len(question.names), found[-1])
    yield Answer("", chip_name(place.chip), place.budget_rule or "", models=tuple(found))


def chip_name(chip: "Chip") -> str:
    """Return a chip's name, with its GPU cores where they are known."""
    return chip.name if chip.gpu_cores is None else f"{chip.name}, {chip.gpu_cores} GPU cores"


def _table(question: Question, limit: int | None) -> Answer:
    from tokamac.engine.limits.whatif import curve, notes, table

    case, found, subject = _inspected(question, limit)
    outcomes = table(subject.config, case, found.place, own=subject.packing)
    last = max(found.context_length or 0, case.context)
    contexts = sorted({max(1, round(last * step / POINTS)) for step in range(POINTS + 1)})
    points = curve(subject.config, case, found.place, contexts, own=subject.packing)
    return Answer(
        model=found.model,
        place=chip_name(found.place.chip),
        rule=found.place.budget_rule or "",
        context_length=found.context_length,
        cases=tuple(_case(each, case) for each in outcomes),
        curve=tuple(CurvePoint(each.context, each.ceiling_tps, each.expected_tps) for each in points),
        roof=None if found.prediction is None else _roof(found.prediction, found.place.chip),
        notes=notes(outcomes, found.form),
    )


def _chips(question: Question) -> Answer:
    from tokamac.engine.limits.subject import subject_of
    from tokamac.engine.limits.whatif import everywhere, on_chips

    subject = subject_of(question.model)
    outcomes = on_chips(subject.config, case_of(question), everywhere(question.where.memory_gb), own=subject.packing)
    return Answer(subject.name, "every chip of the table", chips=tuple(map(_chip, outcomes)))


def _inspected(question: Question, limit: int | None) -> "tuple[Case, Inspection, Subject]":
    from tokamac.engine.limits.inspect import inspect
    from tokamac.engine.limits.places import here
    from tokamac.engine.limits.subject import subject_of

    subject, case = subject_of(question.model), case_of(question)
    place = _place(question.where) or (None if limit is None else here(limit=limit))
    return case, inspect(subject, case, place), subject


def case_of(question: Question) -> "Case":
    """Return the case that is asked about. Raises OptionError for one that can't be."""
    from tokamac.engine.limits.outcomes import Case

    return Case(question.bits, 64, question.kv, question.context, question.prompt)


def _place(where: Where) -> "Place | None":
    from tokamac.engine.limits.places import elsewhere

    return elsewhere(where.chip, where.gpu_cores, where.memory_gb) if where.chip else None


def _case(found: "Outcome", base: "Case") -> CaseLine:
    case = found.case
    return CaseLine(_change(case, base), case.bits, case.kv.key_bits, case.kv.value_bits, case.context, _figures(found))


def _change(case: "Case", base: "Case") -> Change:
    if case.bits != base.bits:
        return "weights"
    if case.kv != base.kv:
        return "keys and values"
    return "context" if case.context != base.context else "as asked"


def _figures(found: "Outcome") -> Figures:
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


def _chip(found: "Outcome") -> ChipLine:
    chip = found.place.chip
    return ChipLine(chip.name, chip.gpu_cores, chip.bandwidth_gbs, _figures(found))


def _model(found: "Suggestion") -> ModelLine:
    return _line(found.id, found.download_bytes, found)


def _prospect(found: "Prospect") -> ModelLine:
    return replace(_line(found.model, None, found), text_only=found.text_only)


def _line(model: str, download_bytes: int | None, found: "Suggestion | Prospect") -> ModelLine:
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
