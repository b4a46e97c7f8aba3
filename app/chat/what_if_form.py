"""The what-if form: what can be chosen, and what its texts mean as a question."""

from collections.abc import Mapping
from dataclasses import replace

from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue
from tokamac.engine.perf.hardware import chip_label, plain_name, table

from ..backend.protocol import ChatCase, Question, Wanted, Where
from ..models.local import hub_cache, names_on_disk
from ..settings_form import whole_number
from . import figures
from .session import Session

HERE = ""
"""The chip that means this machine."""
WEIGHTS = [("as it is", ""), *((f"{bits} bits", str(bits)) for bits in (16, 8, 6, 5, 4, 3, 2))]
LEAST_CONTEXT, PROMPT = 4096, 2048
"""Tokens of the first question."""
KV_BITS = [(name, name) for name in ("16", "8", "8,4", "6", "5", "4", "3", "2")]


def _chips() -> list[tuple[str, str]]:
    named = dict.fromkeys((plain_name(row["chip"]), row["gpu_cores"]) for row in table())
    return [(chip_label(name, cores), f"{name}|{cores or ''}") for name, cores in named]


CHIP_CHOICES = [("here", HERE), *_chips()]


class FormError(ValueError):
    """A text of the form can't be read; the message says why."""


def first_question(session: Session, model: str) -> Question:
    """Return the first case: with the chat's caches, at its context, or one that is long enough to compare at.

    Before it stands the chat's own, at the context that the panel's ceiling holds for: the two are one number.
    """
    kv, own = session.engine.load.kv, session.engine.load.model
    context = max(figures.context_used(session) or 0, LEAST_CONTEXT)
    at, prompt = figures.context_of_ceiling(session)
    now = ChatCase(own, kv, max(at, 1), min(max(prompt, 1), max(at, 1)))
    draft = session.engine.load.draft or ""
    return Question("table", model, kv=kv, context=context, prompt=min(context, PROMPT), now=now, draft=draft)


def known_names(model: str) -> list[str]:
    """Return the models that complete what is typed: the chat's own, those on disk, those of the catalogue."""
    catalogued = (repository.id for entry in catalogue() for repository in entry.repositories)
    return list(dict.fromkeys([model, *names_on_disk(hub_cache()), *catalogued]))


def texts_of(question: Question) -> dict[str, str]:
    """Return a question as the texts of the form."""
    bits = kv_bits(question.kv.key_bits, question.kv.value_bits)
    known = bits if bits in dict(KV_BITS) else "16"
    return {
        "model": question.model,
        "kv": known,
        "context": str(question.context),
        "prompt": str(question.prompt),
        "acceptance": f"{100 * question.acceptance:g} %",
        "draft": question.draft,
    }


def question_of(wanted: Wanted, texts: Mapping[str, str], kv: KVSpec, now: ChatCase | None = None) -> Question:
    """Return the question that the form's texts ask; settings of the caches that it lacks are from ``kv``. Raises FormError.

    now: the chat's own case, which stands beside others of the same model here.
    """
    key_bits, _, value_bits = texts["kv"].partition(",")
    context = _tokens(texts["context"], "context")
    chip, _, cores = texts["chip"].partition("|")
    if not (model := texts["model"].strip()):
        raise FormError("Name a model: a folder, a Hugging Face ID, a name from the catalogue, or guide.")
    question = Question(
        now=now if now is not None and wanted == "table" and not chip and model == now.model else None,
        wanted=wanted,
        model=model,
        bits=int(texts["bits"]) if texts["bits"] else None,
        kv=replace(kv, key_bits=int(key_bits), value_bits=int(value_bits or key_bits)),
        context=context,
        prompt=min(_tokens(texts["prompt"], "prompt"), context),
        where=Where(
            chip, int(cores) if cores else None, _gigabytes(texts["memory"]) if chip or wanted == "chips" else None
        ),
    )
    if wanted != "guesses":
        return question
    return replace(question, acceptance=_share(texts["acceptance"]), draft=texts["draft"].strip())


def kv_bits(key_bits: int, value_bits: int) -> str:
    """Return bits of keys and values as ``--kv-bits`` takes them."""
    return str(key_bits) if key_bits == value_bits else f"{key_bits},{value_bits}"


def _tokens(text: str, name: str) -> int:
    number = whole_number(text.strip().replace(",", "").replace("_", ""))
    if not number:
        raise FormError(f"The {name} must be a number of tokens, 1 or more.")
    return number


def _share(text: str) -> float:
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise FormError("How many guesses come true must be a share from 0 to 100 %.")
    return value / 100


def _gigabytes(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise FormError("The memory must be a size in GB, above 0.")
    return value
