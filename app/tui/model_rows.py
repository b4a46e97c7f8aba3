"""A row of the picker as cells, and what there is to say of it below the list. Names are foreign text: made safe, no markup."""

from collections.abc import Iterator

from textual.content import Content

from tokamac.app.backend.whatif import ModelLine
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import units
from tokamac.app.tui.downloads import Download, Stage
from tokamac.app.tui.models import is_id
from tokamac.app.tui.shelf import Row
from tokamac.app.tui.theme import FAINT
from tokamac.engine.limits import metrics as rates

PENDING = "…"
ROOMY = 92
"""Columns from which an id stands with its owner."""

COLUMNS = (("size", 9), ("bits", 6), ("here", 13), ("expected", 13))
NARROW, NARROWEST = 64, 46
"""Columns below which some of these have no room."""

VERDICTS = {
    "runs well": "$text-success",
    "tight": "$text-warning",
    "slow": "$text-warning",
    "does not fit": "$text-error",
}
SHORTER = {"unknown whether it fits": "fit unknown", "fits, speed unknown": "fits"}
LEAST_NAME = 14
ALL_WEIGHTS = 0.6
"""A dense model uses more than this share of its weights for every token: all but the table that it looks words up in."""


def head(width: int) -> Content:
    """Return the names of the columns above a list of so many cells."""
    names = "".join(name.rjust(cells) for name, cells in _columns(width))
    return Content.styled("  " + "model".ljust(_name_cells(width)) + names, FAINT)


def section_line(text: str) -> Content:
    """Return the head of a section."""
    return Content.styled(text, "bold $text-primary")


def row_line(row: Row, width: int, *, loaded: bool) -> Content:
    """Return a row, ``width`` cells wide. loaded: it is the model that the chat uses."""
    mark = Content.styled("● ", "$text-success") if loaded else Content("  ")
    right = _right(row, width)
    return mark + _name(row.model, width - 2 - right.cell_length, owner=width >= ROOMY) + right


def _right(row: Row, width: int) -> Content:
    """Return what stands right of the name: the cells of the columns, how far a download is, or what Enter does."""
    if row.download is not None:
        style = "$text-error" if row.download.stage is Stage.FAILED else ""
        text = " " + progress_text(row.download)
        return Content.styled(text, style).truncate(width - 2 - LEAST_NAME, ellipsis=True)
    if row.section == "typed":
        return Content.styled(" " + _typed(row), FAINT).truncate(width - 2 - LEAST_NAME, ellipsis=True)
    cells = _cells(row)
    return Content("").join(cells[column] for column, _ in _columns(width))


def detail(row: Row, said: str) -> Content:
    """Return all that is known of a row, its whole name first; or what is ``said`` just now."""
    name = Content.styled(sanitise_line(row.model) + "\n", "bold")
    if said:
        return name + Content.styled(sanitise_line(said), "bold $text-warning")
    if row.download is not None and row.download.problem:
        return name + Content.styled(sanitise_line(row.download.problem), "$text-error")
    return name + Content.styled(" · ".join(_facts(row)), FAINT)


def progress_text(download: Download) -> str:
    """Return how far a download is, in words."""
    match download.stage:
        case Stage.WAITING:
            return "waits for the one before it"
        case Stage.PAUSING:
            return "pausing …"
        case Stage.CANCELLING:
            return "cancelling …"
        case Stage.FAILED:
            return "failed"
        case Stage.PAUSED:
            return f"paused at {_amount(download)}"
        case Stage.RUNNING:
            return _running(download)


def short_name(model: str) -> str:
    """Return the last part of an id or a path, made safe."""
    return sanitise_line(model.rstrip("/").rpartition("/")[2]) or sanitise_line(model)


def _running(download: Download) -> str:
    if download.done is None:
        return "asking the hub …"
    speed = "" if download.rate_bps is None else f" · {units.size(round(download.rate_bps))}/s"
    left = "" if download.left_s is None else f" · {units.seconds(download.left_s)} left"
    return f"{_amount(download)}{speed}{left}"


def _amount(download: Download) -> str:
    share = rates.share(download.done, download.total)
    return units.size(download.done) if share is None else f"{100 * share:.0f} % of {units.size(download.total)}"


def _typed(row: Row) -> str:
    if row.home == "folder":
        return "a folder: Enter loads it"
    return "not here: Enter downloads it" if is_id(row.model) else "Enter loads it"


def _cells(row: Row) -> dict[str, Content]:
    """Return the cells of a row, by column."""
    line, pending = row.line, PENDING if row.pending else units.UNKNOWN
    verdict = pending if line is None else SHORTER.get(line.verdict, line.verdict)
    texts = {
        "size": units.size(row.nbytes) if row.nbytes is not None else pending,
        "bits": pending if line is None else _bits(line),
        "here": verdict,
        "expected": pending if line is None else units.rate(line.figures.expected_tps),
    }
    return {name: _cell(texts[name], cells) for name, cells in COLUMNS}


def _cell(text: str, cells: int) -> Content:
    style = FAINT if text in (units.UNKNOWN, PENDING, "fit unknown") else VERDICTS.get(text, "")
    return Content.styled(text.rjust(cells), style)


def _columns(width: int) -> tuple[tuple[str, int], ...]:
    """Return the columns that a list of so many cells has room for."""
    if width >= NARROW:
        return COLUMNS
    kept = ("here",) if width < NARROWEST else ("size", "here")
    return tuple(column for column in COLUMNS if column[0] in kept)


def _bits(line: ModelLine) -> str:
    return units.UNKNOWN if line.bits_per_weight is None else f"{line.bits_per_weight:.1f}"


def _facts(row: Row) -> Iterator[str]:
    line = row.line
    if row.section == "typed":
        if is_id(row.model) and row.home is None:
            yield "its size is known, and the room on the disk checked, before the download begins"
        return
    if row.home == "embedded":
        yield "embedded: answers about tokamac and inference"
    if row.download is not None:
        yield progress_text(row.download)
    elif row.nbytes is not None:
        yield f"{units.size(row.nbytes)} {'on disk' if row.on_disk else 'to download'}"
    if line is None:
        if row.pending:
            yield "what it would do here is being computed"
        return
    yield f"{units.short(line.parameters)} weights{_active(line)}"
    if line.text_only:
        yield "text only: what it could see or hear is left out"
    yield sanitise_line(line.figures.reason)
    yield _speeds(line)


def _speeds(line: ModelLine) -> str:
    """Return the figures that the context decides, with the context that they are for."""
    at = "" if line.context is None else f"at {line.context:,} tokens: "
    rates_text = f"expected {units.rate(line.figures.expected_tps)}, ceiling {units.rate(line.figures.ceiling_tps)}"
    return f"{at}{rates_text}, first token {units.seconds(line.figures.ttft_s)}"


def _active(line: ModelLine) -> str:
    share = rates.share(line.active_parameters, line.parameters)
    if share is None or share > ALL_WEIGHTS:
        return ""
    return f", {units.short(line.active_parameters)} a token"


def _name_cells(width: int) -> int:
    return max(10, width - 2 - sum(cells for _, cells in _columns(width)))


def _name(model: str, cells: int, *, owner: bool) -> Content:
    """Return a name of exactly so many cells: whole where there is room, else its last part."""
    whole, tail = sanitise_line(model), Content(short_name(model))
    before = whole[: len(whole) - len(tail.plain)] if owner else ""
    shown = Content.styled(before, FAINT) + tail
    if shown.cell_length >= cells:
        shown = tail.truncate(cells - 1, ellipsis=True)
    return shown.pad_right(cells - shown.cell_length)
