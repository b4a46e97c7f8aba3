"""What this machine, or another, makes of a model that is here: the same figures as for those of the catalogue."""

from dataclasses import dataclass, replace

from tokamac.engine.context_length import context_length
from tokamac.engine.errors import TokamacError
from tokamac.engine.limits.family import leaves_out_senses
from tokamac.engine.limits.outcomes import Case, Outcome, outcome_of
from tokamac.engine.limits.places import Place
from tokamac.engine.limits.subject import subject_of
from tokamac.engine.limits.suggest import Verdict, reason_of, verdict_of
from tokamac.engine.limits.weighing import Weighed, weigh


@dataclass(frozen=True, slots=True)
class Prospect:
    """A model at a place. None is unknown. parameters: all weights; active_parameters: those a token uses. reason: one sentence.

    text_only: it sees or hears, too, and that is left out.
    """

    model: str
    parameters: int | None
    active_parameters: int | None
    outcome: Outcome
    verdict: Verdict
    reason: str
    text_only: bool = False


def prospect(model: str, case: Case, place: Place) -> Prospect:
    """Return what ``place`` makes of a folder or an id that is on disk. A context longer than the model's own is cut to that.

    Never raises for what the model is: one that can't be weighed is unknown, and the reason says why.
    """
    try:
        weighed, case = _weigh(model, case, place)
        found = outcome_of(weighed, case, place)
    except TokamacError as error:
        weighed, found = error.message, Outcome(case, place, reason=error.message)
    except Exception as error:  # a config may hold anything, and one must not take the others of a list with it
        why = f"its config is not understood ({type(error).__name__})"
        weighed, found = why, Outcome(case, place, reason=why)
    verdict = verdict_of(found)
    known = weighed.stored if isinstance(weighed, Weighed) else None
    return Prospect(
        model=model,
        parameters=None if known is None else known.parameters,
        active_parameters=None if known is None else known.active_parameters,
        outcome=found,
        verdict=verdict,
        reason=reason_of(found, verdict),
        text_only=isinstance(weighed, Weighed) and leaves_out_senses(weighed.config),
    )


def _weigh(model: str, case: Case, place: Place) -> tuple[Weighed | str, Case]:
    subject = subject_of(model)
    context = min(case.context, context_length(subject.config) or case.context)
    case = replace(case, context=context, prompt=min(case.prompt, context))
    weighed = weigh(subject.config, place.device, place.memory_bytes, packing=subject.packing, folder=subject.folder)
    return weighed, case
