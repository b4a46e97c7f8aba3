"""The what-if form: what can be chosen, and what its texts mean as a question.

Rows of the what-if tables. Cells are plain text with a style: names come from outside, and no markup in them is interpreted.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rich.text import Text

from tokamac.app import units
from tokamac.app.backend.protocol import CaseLine, Change, ChipLine, Figures, ModelLine, Question, Wanted, Where
from tokamac.app.chat import figures
from tokamac.app.chat.models import hub_cache, names_on_disk, short_name
from tokamac.app.chat.preferences import whole_number
from tokamac.app.chat.session import Session
from tokamac.app.sanitise import sanitise_line
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.catalogue import catalogue
from tokamac.engine.perf.hardware import plain_name, table

CASES = ("change", "weights", "KV", "context", "memory", "fits", "ceiling", "expected", "TTFT")
CHIPS = ("chip", "bandwidth", "fits", "ceiling", "expected", "TTFT")
MODELS = ("model", "verdict", "expected", "TTFT", "memory", "download", "weights", "active")
SHORTER = {"unknown whether it fits": "fit unknown", "fits, speed unknown": "fits"}
"""Verdicts that the other columns say the rest of."""

NUMBERS = frozenset({"context", "memory", "ceiling", "expected", "TTFT", "bandwidth", "download", "active"})
Row = tuple[Text, ...]


def case_columns(*, narrow: bool) -> tuple[str, ...]:
    """Return the columns of the cases. narrow: without the name of what was changed, which is bold in its own column then."""
    return CASES[1:] if narrow else CASES


def head(column: str) -> Text:
    """Return a column's head, above numbers flush right as they are."""
    return Text(column, justify="right" if column in NUMBERS else "left")


def case_rows(lines: Iterable[CaseLine], *, narrow: bool = False) -> Iterator[Row]:
    """Yield a row for each case, as ``case_columns``; what was changed is named once for those that follow each other."""
    before = ""
    for line in lines:
        change = "" if line.change == before else line.change
        before = line.change
        weights = "as it is" if line.bits is None else f"{line.bits} bits"
        cells = [
            _plain(weights, _weight(line.change, "weights", narrow=narrow)),
            _plain(kv_bits(line.key_bits, line.value_bits), _weight(line.change, "keys and values", narrow=narrow)),
            _number(f"{line.context:,}", _weight(line.change, "context", narrow=narrow)),
        ]
        named = () if narrow else (_plain(change, "dim"),)
        yield (*named, *cells, *_memory(line.figures), *_speeds(line.figures))


def _weight(changed: Change, column: Change, *, narrow: bool) -> str:
    """Return the style of a cell: of the case that was asked about, and of what was changed where no column names it."""
    return "bold" if changed == "as asked" or (narrow and changed == column) else ""


def chip_rows(lines: Iterable[ChipLine]) -> Iterator[Row]:
    """Yield a row for each chip."""
    for line in lines:
        name = line.chip if line.gpu_cores is None else f"{line.chip}, {line.gpu_cores}"
        yield (_plain(name), _number(units.bandwidth(line.bandwidth_gbs)), _fits(line.figures), *_speeds(line.figures))


def model_rows(lines: Iterable[ModelLine], *, narrow: bool = False) -> Iterator[Row]:
    """Yield a row for each model. narrow: by the last part of its id."""
    styles = {"runs well": "green", "tight": "yellow", "slow": "yellow", "does not fit": "red"}
    for line in lines:
        yield (
            _plain(short_name(line.model) if narrow else line.model),
            _plain(SHORTER.get(line.verdict, line.verdict), styles.get(line.verdict, "dim")),
            _number(units.rate(line.figures.expected_tps)),
            _number(units.seconds(line.figures.ttft_s)),
            _number(units.size(line.figures.memory_bytes)),
            _number(units.size(line.download_bytes)),
            _number(units.short(line.parameters)),
            _number(units.short(line.active_parameters)),
        )


def kv_bits(key_bits: int, value_bits: int) -> str:
    """Return bits of keys and values as ``--kv-bits`` takes them."""
    return str(key_bits) if key_bits == value_bits else f"{key_bits},{value_bits}"


def _memory(figures: Figures) -> tuple[Text, Text]:
    return _number(units.size(figures.memory_bytes)), _fits(figures)


def _fits(figures: Figures) -> Text:
    if figures.fits and figures.from_others:
        return Text("tight", "yellow")
    return {True: Text("yes", "green"), False: Text("no", "red"), None: Text(units.UNKNOWN, "dim")}[figures.fits]


def _speeds(figures: Figures) -> tuple[Text, Text, Text]:
    return (
        _number(units.rate(figures.ceiling_tps)),
        _number(units.rate(figures.expected_tps)),
        _number(units.seconds(figures.ttft_s)),
    )


def _plain(text: str, style: str = "") -> Text:
    return Text(sanitise_line(text), style)


def _number(text: str, style: str = "") -> Text:
    return Text(text, "dim" if text == units.UNKNOWN else style, justify="right")


HERE = ""
"""The chip that means this machine."""

WEIGHTS = [("as it is", ""), *((f"{bits} bits", str(bits)) for bits in (16, 8, 6, 5, 4, 3, 2))]
LEAST_CONTEXT, PROMPT = 4096, 2048
"""Tokens to begin with."""

KV_BITS = [(name, name) for name in ("16", "8", "8,4", "6", "5", "4", "3", "2")]


def _chips() -> list[tuple[str, str]]:
    rows = [(plain_name(row["chip"]), row["gpu_cores"]) for row in table()]
    named = dict.fromkeys((name, f"{name}|{cores or ''}", cores) for name, cores in rows)
    return [(name if cores is None else f"{name}, {cores}", key) for name, key, cores in named]


CHIP_CHOICES = [("here", HERE), *_chips()]


class FormError(ValueError):
    """A text of the form means nothing; the message is for the reader."""


def first_question(session: Session, model: str) -> Question:
    """Return the case to begin with: with the chat's caches, at the context it has come to."""
    context = max(figures.context_used(session) or 0, LEAST_CONTEXT)
    return Question("table", model, kv=session.engine.load.kv, context=context, prompt=min(context, PROMPT))


def known_names(model: str) -> list[str]:
    """Return models to complete what is typed: the chat's own, those on disk, those of the catalogue."""
    catalogued = (repository.id for entry in catalogue() for repository in entry.repositories)
    return list(dict.fromkeys([model, *names_on_disk(hub_cache()), *catalogued]))


def written(question: Question) -> dict[str, str]:
    """Return a question as the form's texts."""
    bits = kv_bits(question.kv.key_bits, question.kv.value_bits)
    known = bits if bits in dict(KV_BITS) else "16"
    return {"model": question.model, "kv": known, "context": str(question.context), "prompt": str(question.prompt)}


def read(wanted: Wanted, texts: Mapping[str, str], kv: KVSpec) -> Question:
    """Return the question that the form's texts ask; what they don't say of the caches is as in ``kv``. Raises FormError."""
    key_bits, _, value_bits = texts["kv"].partition(",")
    context = _tokens(texts["context"], "context")
    chip, _, cores = texts["chip"].partition("|")
    if not (model := texts["model"].strip()):
        raise FormError("Name a model: a folder, a Hugging Face id, a name of the catalogue, or guide.")
    return Question(
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


def _tokens(text: str, name: str) -> int:
    number = whole_number(text.strip().replace(",", "").replace("_", ""))
    if not number:
        raise FormError(f"The {name} is a number of tokens, 1 or more.")
    return number


def _gigabytes(text: str) -> float | None:
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise FormError("The memory is a size in GB, above 0.")
    return value
