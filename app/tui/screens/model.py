"""Ctrl+O: choose a model; F4: convert one."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.css.query import NoMatches
from textual.events import Resize
from textual.timer import Timer
from textual.widgets import Button, Input, Label, OptionList, Select, Static
from textual.widgets.option_list import Option

from tokamac.engine import metrics as rates
from tokamac.engine.files import is_file
from tokamac.engine.perf.catalogue import draft_for

from ...backend.protocol import ModelLine
from ...chat.session import Session
from ...chat.steps import EnginePhase
from ...models.jobs import BITS, ConversionForm, ConversionJob, ConversionPhase, Conversions, Download, DownloadStage
from ...models.listing import NO_START, ModelRow, Removal, section_title
from ...models.local import is_id, short_name
from ...text import units
from ...text.sanitise import sanitise_line
from ..model_library import ModelLibrary
from ..theme import FAINT
from ..widgets.prompt_input import TextInput
from .dialog import Dialog

# Sizes, fit and speeds arrive in the background and update rows in place. Names are foreign text: sanitised, no
# markup.


PENDING = "…"
ROOMY = 92  # columns from which an id stands with its owner

COLUMNS = (("size", 9), ("expected", 13), ("here", 13), ("context", 9))
WIDE_COLUMNS = (*COLUMNS, ("licence", 12))
GOOD_FOR = 25
WIDE, NARROW, NARROWEST = 104, 72, 52  # columns below which some of these have no room

WORSE = "worse answers"
VERDICTS = {
    WORSE: "$text-error",
    "runs well": "$text-success",
    "tight": "$text-warning",
    "slow": "$text-warning",
    "does not fit": "$text-error",
}
SHORTER = {"unknown whether it fits": "fit unknown", "fits, speed unknown": "fits"}
LEAST_NAME = 14
ALL_WEIGHTS = 0.6  # a dense model uses more than this share of its weights for every token: all but the embedding table


def head(width: int) -> Content:
    names = "".join(name.rjust(cells) for name, cells in _columns(width))
    names += "  good for" if width >= WIDE else ""
    return Content.styled("  " + "model".ljust(_name_cells(width)) + names, FAINT)


def section_line(text: str) -> Content:
    return Content.styled(text, "bold $text-primary")


def row_line(row: ModelRow, width: int, *, loaded: bool) -> Content:
    mark = Content.styled("● ", "$text-success") if loaded else Content("  ")
    right = _right(row, width)
    return mark + _name(row.model, width - 2 - right.cell_length, owner=width >= ROOMY) + right


def _right(row: ModelRow, width: int) -> Content:
    if row.download is not None:
        style = "$text-error" if row.download.stage is DownloadStage.FAILED else ""
        text = " " + progress_text(row.download)
        return Content.styled(text, style).truncate(width - 2 - LEAST_NAME, ellipsis=True)
    if row.converting:
        return Content.styled(" " + row.converting).truncate(width - 2 - LEAST_NAME, ellipsis=True)
    if row.section == "typed":
        return Content.styled(" " + _typed(row), FAINT).truncate(width - 2 - LEAST_NAME, ellipsis=True)
    cells = _cells(row)
    shown = Content("").join(cells[column] for column, _ in _columns(width))
    if width < WIDE:
        return shown
    purpose = Content.styled(sanitise_line(row.facts.good_for), FAINT).truncate(GOOD_FOR - 2, ellipsis=True)
    return shown + "  " + purpose.pad_right(GOOD_FOR - 2 - purpose.cell_length)


def detail(row: ModelRow, said: str) -> Content:
    name = Content.styled(sanitise_line(row.model) + "\n", "bold")
    if said:
        return name + Content.styled(sanitise_line(said), "bold $text-warning")
    if row.download is not None and row.download.problem:
        return name + Content.styled(sanitise_line(row.download.problem), "$text-error")
    return name + Content.styled(" · ".join(filter(None, _facts(row))), FAINT)


def progress_text(download: Download) -> str:
    match download.stage:
        case DownloadStage.WAITING:
            return "queued"
        case DownloadStage.PAUSING:
            return "pausing …"
        case DownloadStage.CANCELLING:
            return "cancelling …"
        case DownloadStage.FAILED:
            return "failed"
        case DownloadStage.PAUSED:
            return f"paused at {_amount(download)}"
        case DownloadStage.RUNNING:
            return _running(download)


def _running(download: Download) -> str:
    if download.done is None:
        return "contacting the hub …"
    speed = "" if download.rate_bps is None else f" · {units.size(round(download.rate_bps))}/s"
    left = "" if download.left_s is None else f" · {units.seconds(download.left_s)} left"
    return f"{_amount(download)}{speed}{left}"


def _amount(download: Download) -> str:
    share = rates.share(download.done, download.total)
    return units.size(download.done) if share is None else f"{100 * share:.0f} % of {units.size(download.total)}"


def _typed(row: ModelRow) -> str:
    if row.home == "folder":
        return "a folder: Enter loads it"
    return "not on this disk: Enter downloads it" if is_id(row.model) else "Enter searches Hugging Face"


def _cells(row: ModelRow) -> dict[str, Content]:
    line, pending = row.line, PENDING if row.pending else ""  # what is unknown is left empty
    verdict = pending if line is None else SHORTER.get(line.verdict, line.verdict)
    texts = {
        "size": units.size(row.nbytes) if row.nbytes is not None else pending,
        "here": WORSE if row.worse and verdict != "does not fit" else verdict,
        "expected": pending
        if line is None
        else ""
        if line.figures.expected_tps is None
        else units.rate(line.figures.expected_tps),
        "context": "" if row.facts.context is None else _tokens(row.facts.context),
        "licence": sanitise_line(row.facts.licence)[:10],
    }
    return {name: _cell(texts[name], cells) for name, cells in WIDE_COLUMNS}


def _tokens(context: int) -> str:
    """Return a context length as advertised: 4k, 128k."""
    return f"{context / 1024:.0f}k" if context >= 1024 else str(context)


def _cell(text: str, cells: int) -> Content:
    style = FAINT if text in (PENDING, "fit unknown") else VERDICTS.get(text, "")
    return Content.styled(text.rjust(cells), style)


def _columns(width: int) -> tuple[tuple[str, int], ...]:
    if width >= WIDE:
        return WIDE_COLUMNS
    if width >= NARROW:
        return COLUMNS
    kept = ("expected",) if width < NARROWEST else ("size", "expected")
    return tuple(column for column in COLUMNS if column[0] in kept)


def _bits(line: ModelLine) -> str:
    return units.UNKNOWN if line.bits_per_weight is None else f"{line.bits_per_weight:.1f}"


def _facts(row: ModelRow) -> Iterator[str]:
    line = row.line
    if row.worse:
        yield row.worse.rstrip(".")
    if row.converting:
        yield f"{row.converting}; the result goes to the models folder. You can chat meanwhile"
        return
    if row.section == "typed":
        if is_id(row.model) and row.home is None:
            yield "its size and the free space are checked before the download starts"
        return
    if row.home == "embedded":
        yield "embedded: answers questions about tokamac and inference"
    if row.download is not None:
        yield progress_text(row.download)
    elif row.nbytes is not None:
        yield f"{units.size(row.nbytes)} {'on disk' if row.on_disk else 'to download'}"
    if row.start is not None:
        yield row.start.wait
    if row.path is not None:
        yield f"in {sanitise_line(str(row.path.parent))}{f' ({row.owner})' if row.owner else ''}"
        if is_file(row.path):
            yield "a GGUF file: runs as it is"
    yield from _known(row)
    if line is None:
        if row.pending:
            yield "its speed here is being estimated"
        return
    yield f"{units.short(line.parameters)} weights{_active(line)}"
    if line.text_only:
        yield "text only: images and audio are not supported"
    yield sanitise_line(line.figures.reason)
    yield _speeds(line)


def _known(row: ModelRow) -> Iterator[str]:
    facts, line = row.facts, row.line
    if facts.good_for:
        yield f"good for: {sanitise_line(facts.good_for)}"
    if facts.context is not None:
        yield f"context {facts.context:,} tokens"
    if facts.licence:
        yield f"licence {sanitise_line(facts.licence)}"
    if facts.downloads is not None:
        yield f"{units.short(facts.downloads)} downloads a month"
    if line is not None and line.bits_per_weight is not None:
        yield f"{line.bits_per_weight:.1f} bits"
    if (draft := draft_for(row.model)) is not None:
        yield f"draft model: {short_name(draft.id)}, {units.size(draft.published_bytes)}"


def _speeds(line: ModelLine) -> str:
    figures = line.figures
    known = (
        "" if figures.expected_tps is None else f"expected {units.rate(figures.expected_tps)}",
        "" if figures.ceiling_tps is None else f"ceiling {units.rate(figures.ceiling_tps)}",
        "" if figures.ttft_s is None else f"first token {units.seconds(figures.ttft_s)}",
    )
    told = ", ".join(filter(None, known))
    return told if line.context is None or not told else f"at {line.context:,} tokens: {told}"


def _active(line: ModelLine) -> str:
    share = rates.share(line.active_parameters, line.parameters)
    if share is None or share > ALL_WEIGHTS:
        return ""
    return f", {units.short(line.active_parameters)} a token"


def _name_cells(width: int) -> int:
    return max(10, width - 2 - sum(cells for _, cells in _columns(width)) - (GOOD_FOR if width >= WIDE else 0))


def _name(model: str, cells: int, *, owner: bool) -> Content:
    whole, tail = sanitise_line(model), Content(short_name(model))
    before = whole[: len(whole) - len(tail.plain)] if owner else ""
    shown = Content.styled(before, FAINT) + tail
    if shown.cell_length >= cells:
        shown = tail.truncate(cells - 1, ellipsis=True)
    return shown.pad_right(cells - shown.cell_length)


SCROLLBAR = 2
LEAST = 30  # cells, also before the list has a size


class ModelList(OptionList, can_focus=False):
    def __init__(self) -> None:
        super().__init__(markup=False, compact=True)
        self._shown_rows: dict[str, ModelRow] = {}
        self._shown_lines: dict[str, Content] = {}

    @property
    def cells(self) -> int:
        return max(LEAST, self.content_size.width - SCROLLBAR)

    @property
    def selected(self) -> ModelRow | None:
        option = self.highlighted_option
        return None if option is None or option.id is None else self._shown_rows.get(option.id)

    def page(self, step: int) -> None:
        (self.action_page_up if step < 0 else self.action_page_down)()  # type: ignore[no-untyped-call]  # Textual's

    def show(
        self, rows: Sequence[ModelRow], library: ModelLibrary, *, loaded: str, afresh: bool, searching: bool = False
    ) -> None:
        before = None if afresh else self.selected
        lines = dict(self._drawn(rows, library, loaded, searching=searching))
        self._shown_rows = {row.id: row for row in rows}
        if list(lines) == list(self._shown_lines):
            for id_, line in lines.items():
                if not line.is_same(self._shown_lines[id_]):
                    self.replace_option_prompt(id_, line)
        else:
            self.clear_options()
            self.add_options(Option(line, id=id_, disabled=id_ not in self._shown_rows) for id_, line in lines.items())
        self._shown_lines = lines
        self._select(rows, before, loaded)

    def _select(self, rows: Sequence[ModelRow], before: ModelRow | None, loaded: str) -> None:
        wanted = [
            *(row for row in rows if before is not None and row.id == before.id),
            *(row for row in rows if before is not None and row.model == before.model),
            *(row for row in rows if row.model == loaded),
            *(row for row in rows if row.section != "downloads"),
            *rows,
        ]
        self.highlighted = self.get_option_index(wanted[0].id) if wanted else None

    def _drawn(
        self, rows: Sequence[ModelRow], library: ModelLibrary, loaded: str, *, searching: bool
    ) -> Iterator[tuple[str, Content]]:
        title = ""
        if not searching and not any(row.section == "start" for row in rows):
            yield "start", section_line("Start here")
            yield "start:", Content.styled(f"  {no_start(library)}", FAINT)
        for row in rows:
            if (now := _title(row, library)) != title:
                title = now
                yield row.section, section_line(title)
            yield row.id, row_line(row, self.cells, loaded=row.model == loaded and row.on_disk)
        if searching and (state := library.hub.found.state):
            if not any(row.section == "hub" for row in rows):
                yield "hub", section_line("On Hugging Face")
            yield "hub:", Content.styled(f"  {state}", FAINT)


def _title(row: ModelRow, library: ModelLibrary) -> str:
    match row.section:
        case "typed":
            return "As typed"
        case "converting":
            return "Converting"
        case "downloads":
            return "Downloads"
        case "embedded" | "disk":
            return f"On this {HERE} · {units.size(library.disk.free_bytes)} free"
        case _:
            return section_title(row.section, library.estimates, row.start)


HERE = "Mac" if sys.platform == "darwin" else "disk"


def no_start(library: ModelLibrary) -> str:
    return "it is on this disk already" if library.start is not None else NO_START


SHORT = 18  # rows of a window below which the list takes those around it

REST_S = 0.6  # a pause of this length in typing asks the hub

ACTIVE = (DownloadStage.WAITING, DownloadStage.RUNNING)


class ModelScreen(Dialog[str]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        # Before the input line, which has uses of its own for some of these keys.
        Binding("up", "move(-1)", "Up", id="model.up", show=False, priority=True),
        Binding("down", "move(1)", "Down", id="model.down", show=False, priority=True),
        Binding("pageup,f8", "page(-1)", "Page up", id="model.page_up", show=False, priority=True),
        Binding("pagedown,f9", "page(1)", "Page down", id="model.page_down", show=False, priority=True),
        Binding("f3", "what_if", "What if", id="model.what_if"),
        Binding("f4", "convert", "Convert", id="model.convert"),
        Binding("ctrl+g", "download", "Download, pause, resume", id="model.download", priority=True),
        Binding("ctrl+k", "cancel", "Cancel a download, stop a conversion", id="model.cancel", priority=True),
        Binding("ctrl+e", "unload", "Unload", id="model.unload", priority=True),
        Binding("ctrl+d", "remove", "Remove", id="model.remove", priority=True),
    ]

    def __init__(
        self,
        library: ModelLibrary,
        session: Session,
        what_if: Callable[[str], None],
        unload: Callable[[], None],
        *,
        text: str = "",
    ) -> None:
        super().__init__()
        self._library = library
        self._session = session
        self._what_if = what_if
        self._unload = unload
        self._removal = Removal()
        self._afresh = True
        self._said = ""
        self._rest: Timer | None = None
        self._text = text

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Model"
            yield TextInput(self._text, placeholder="Search here and on Hugging Face, or a folder or ID", compact=True)
            yield Static(id="head", markup=False)
            yield ModelList()
            yield Static(id="detail", markup=False)

    def on_mount(self) -> None:
        self._library.watcher = self.refresh_rows
        self.refresh_rows()
        self._library.look()

    def on_unmount(self) -> None:
        self._library.watcher = None

    def on_screen_resume(self) -> None:
        self._library.estimates.again()
        if self._library.looked:
            self._library.look()

    def on_resize(self, event: Resize) -> None:
        self.set_class(event.size.height < SHORT, "-short")
        self.call_after_refresh(self.refresh_rows)

    # The list -------------------------------------------------------------------------------------------------------------

    @property
    def _list(self) -> ModelList:
        return self.query_one(ModelList)

    @on(Input.Changed)
    def typed(self) -> None:
        self._removal.forget()
        self._afresh = True
        self.refresh_rows()
        if self._rest is not None:
            self._rest.stop()
        self._rest = self.set_timer(REST_S, self._search)

    def _search(self) -> None:
        self._library.hub.want(self.query_one(Input).value)

    def refresh_rows(self) -> None:
        with suppress(NoMatches):  # the screen is being left: its parts go before it, one after another
            self._refresh_rows()

    def _refresh_rows(self) -> None:
        text = self.query_one(Input).value
        width = self._list.cells
        self.query_one("#head", Static).update(head(width))
        rows, searching = self._library.rows(text), bool(text.strip())
        self._list.show(rows, self._library, loaded=self._loaded, afresh=self._afresh, searching=searching)
        self._tell()

    @property
    def _loaded(self) -> str:
        return (
            ""
            if self._session.engine.phase in (EnginePhase.UNLOADED, EnginePhase.FAILED)
            else self._session.engine.load.model
        )

    @on(OptionList.OptionHighlighted)
    def highlighted(self) -> None:
        if not self._removal.is_for(self._list.selected):
            self._removal.forget()
            self._said = ""
        self._tell()

    def action_move(self, step: int) -> None:
        self._afresh = False
        self._list.action_cursor_up() if step < 0 else self._list.action_cursor_down()

    def action_page(self, step: int) -> None:
        self._afresh = False
        self._list.page(step)

    # Choosing -------------------------------------------------------------------------------------------------------------

    @on(Input.Submitted)
    def entered(self) -> None:
        self._take(self._list.selected)

    @on(OptionList.OptionSelected)
    def picked(self) -> None:
        self._take(self._list.selected)

    def _take(self, row: ModelRow | None) -> None:
        if row is None:
            return
        if self._removal.is_for(row):
            self.action_remove()
        elif row.converting:
            self.action_convert()
        elif row.section == "typed" and row.home is None and not is_id(row.model):
            self._search()
            self._say("Searching Hugging Face for it; the results come below.")
        elif row.download is not None and row.download.stage in ACTIVE:
            self._library.downloads.start(row.model, loads=True)
            self._say("It loads when the download is complete.")
        else:
            self.dismiss(row.model)

    def _named(self) -> str:
        row = self._list.selected
        return self._session.engine.load.model if row is None else row.model

    def action_what_if(self) -> None:
        self._what_if(self._named())

    def action_convert(self) -> None:
        pass  # MERGED

        self.app.push_screen(
            ConvertScreen(self._named(), self._library.conversions, self._library.models_folder), self._converted
        )

    def _converted(self, folder: str | None) -> None:
        if folder is not None:
            self.dismiss(folder)

    # Changing -------------------------------------------------------------------------------------------------------------

    def action_download(self) -> None:
        row = self._list.selected
        if row is None:
            return
        if row.download is not None and row.download.stage in ACTIVE:
            self._library.downloads.pause(row.model)
        elif row.download is not None or (not row.on_disk and is_id(row.model)):
            self._library.downloads.start(row.model)
        else:
            self._say(
                "It is already on this disk."
                if row.on_disk
                else "A download needs a Hugging Face ID, such as org/name."
            )

    def action_cancel(self) -> None:
        """Cancel a download and delete its files, or stop a resumable conversion."""
        row = self._list.selected
        if row is not None and row.converting:
            self._library.conversions.stop()
        elif row is not None and row.download is not None:
            self._library.downloads.cancel(row.model)
        else:
            self._say("This model is neither downloading nor being converted.")

    def action_unload(self) -> None:
        self._afresh = False
        self._unload()
        self.refresh_rows()

    def action_remove(self) -> None:
        """Remove after confirmation: cached models from disk, folders only from the list."""
        row = self._list.selected
        if row is None:
            return
        if refused := self._removal.refusal(row, self._loaded):
            self._say(refused)
        elif row.home == "folder":
            self._library.forget_folder(row.model)
            self.notify("Removed from the list. The folder itself is unchanged.", markup=False, timeout=5)
        elif self._removal.is_for(row):
            self._removal.forget()
            self._library.remove(row.model)
            self._say("Removing …")
        else:
            self._removal.ask(row)
            self._say(
                f"Delete {units.size(row.nbytes)} from the disk? Press Ctrl+D again or Enter to delete, Esc to keep it."
            )

    def action_leave(self) -> None:
        if self._removal.asked:
            self._removal.forget()
            self._say("")
        else:
            self.dismiss(None)

    # What is shown --------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._said = text
        self._tell()

    def _tell(self) -> None:
        row = self._list.selected
        self.query_one("#detail", Static).update("No matches." if row is None else detail(row, self._said))
        keys = ("Enter deletes", "Esc keeps") if self._removal.asked else (*self._uses(row), "Esc closes")
        if keys != self._keys:
            self.say_keys(*keys)

    def _uses(self, row: ModelRow | None) -> list[str]:
        if row is None:
            return []
        if row.converting:
            return ["Enter shows it", "Ctrl+K stops"]
        if row.download is not None and row.download.stage is DownloadStage.FAILED:
            return ["Enter retries", "Ctrl+K cancels"]
        if row.download is not None:
            going = row.download.stage in ACTIVE
            return [f"Ctrl+G {'pauses' if going else 'resumes'}", "Ctrl+K cancels", "Enter loads it when complete"]
        if not row.on_disk and row.home is None and is_id(row.model):
            return ["Enter downloads and loads", "Ctrl+G downloads", "F3 what if"]
        if row.model == self._loaded:
            return ["Ctrl+E unloads", "Enter reloads", "F3 what if", "F4 converts"]
        removes = [] if row.home in (None, "embedded") else ["Ctrl+D removes"]
        return ["Enter loads", *removes, "F3 what if", "F4 converts"]


# Shows the model library's single conversion (``Conversions``), so that it can be left and reopened.


# Text fields: the name in a ConversionForm, the label, a hint.
FIELDS = (
    ("source", "Model", "a folder or a Hugging Face ID"),
    ("recipe", "Recipe", "or a rule that mixes bits (mixed_4_6)"),
    ("target_bpw", "Bits per weight", "or an average (4.5)"),
    ("output", "New folder", "chosen for you, in {}"),
)

# Buttons, and the phases in which they are shown.
SHOWN = {
    "plan": (ConversionPhase.FORM, ConversionPhase.PLANNED),
    "convert": (ConversionPhase.FORM, ConversionPhase.PLANNED),
    "stop": (ConversionPhase.PLANNING, ConversionPhase.RUNNING),
    "use": (ConversionPhase.DONE,),
}
CLOSES, STOPS = "Esc closes", "Esc stops"
# What the keys do in each phase.
KEYS = {
    ConversionPhase.FORM: ("Enter plans", CLOSES),
    ConversionPhase.PLANNING: (STOPS,),
    ConversionPhase.PLANNED: ("Enter converts", CLOSES),
    ConversionPhase.RUNNING: ("Esc: back to the chat, this goes on", "Ctrl+K stops"),
    ConversionPhase.STOPPING: (CLOSES,),
    ConversionPhase.DONE: ("Enter loads it", CLOSES),
}


class ConvertScreen(Dialog[str]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("f4", "leave", "Close", id="convert.leave", show=False),
        Binding("ctrl+k,f6", "stop", "Stop the conversion", id="convert.stop", show=False),
    ]

    def __init__(self, source: str, conversions: Conversions[ConversionForm], models_folder: Path) -> None:
        super().__init__()
        self._source = source
        self._conversions = conversions
        self._models_folder = models_folder

    @property
    def job(self) -> ConversionJob:
        return self._conversions.job

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box", can_focus=False) as box:
            box.border_title = "Convert a model"
            self._conversions.shown(self._source)
            form = self._conversions.form or ConversionForm(self._source)
            for name, label, hint in FIELDS:
                said = hint.format(_in_home(self._models_folder))
                yield _field(label, TextInput(getattr(form, name), said, id=name, compact=True))
                if name == "source":
                    yield _field("Bits", _bits_text(form.bits))
            yield Static("", id="problem", markup=False)
            yield Static("", id="said", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Plan", id="plan", compact=True)
                yield Button("Convert", variant="primary", id="convert", compact=True)
                yield Button("Stop", id="stop", compact=True)
                yield Button("Load it", variant="primary", id="use", compact=True)

    def on_mount(self) -> None:
        self._conversions.watcher = self._hear
        self._shown_phase = self.job.phase
        self._show()

    def on_unmount(self) -> None:
        self._conversions.watcher = None

    # What the user wants --------------------------------------------------------------------------------------------------

    @on(Input.Changed)
    @on(Select.Changed)
    def changed(self) -> None:
        if not self.job.busy and self._form() != self._conversions.form:
            self.job.change()
            self._show()

    @on(Input.Submitted)
    @on(Button.Pressed, "#plan")
    def plan(self) -> None:
        self._begin(dry_run=True)

    @on(Button.Pressed, "#convert")
    def convert(self) -> None:
        self._begin(dry_run=False)

    @on(Button.Pressed, "#stop")
    def action_stop(self) -> None:
        self._conversions.stop()

    @on(Button.Pressed, "#use")
    def use(self) -> None:
        if self.job.converted is not None:
            folder = str(Path(self.job.converted.path).absolute())
            self._conversions.seen()
            self.dismiss(folder)

    def action_leave(self) -> None:
        if self.job.phase is ConversionPhase.PLANNING:
            self._conversions.stop()
        else:
            self._conversions.seen()
            self.dismiss(None)

    # The process ----------------------------------------------------------------------------------------------------------

    def _begin(self, *, dry_run: bool) -> None:
        form = self._form()
        if not form.source:
            self.query_one("#source", Input).focus()
        elif not self.job.busy:
            self._conversions.begin(form, dry_run=dry_run)

    def _hear(self) -> None:
        before, phase = self._shown_phase, self.job.phase
        self._shown_phase = phase
        self._show()
        if phase is not before and not self.job.busy:
            following = {ConversionPhase.PLANNED: "#convert", ConversionPhase.DONE: "#use"}.get(phase, "#source")
            self.call_after_refresh(self.query_one(following).focus)  # which also brings it into view

    def _form(self) -> ConversionForm:
        texts = {box.id or "": box.value.strip() for box in self.query(Input)}
        bits = str(self.query_one("#bits", Select).value)
        output = texts.pop("output")
        if output and output not in (".", "..") and "/" not in output and not output.startswith("~"):
            output = str(self._models_folder / output)
        return ConversionForm(**texts, output=output, bits=bits, into=str(self._models_folder))

    # What is shown --------------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        job = self.job
        self.query_one("#problem", Static).update(job.problem)
        self.query_one("#problem").display = bool(job.problem)
        self.query_one("#said", Static).update(Content(job.text()))
        self.query_one("#said").display = bool(job.text())
        if (keys := KEYS[job.phase]) != self._keys:
            self.say_keys(*keys)
        for name, phases in SHOWN.items():
            self.query_one(f"#{name}", Button).display = job.phase in phases
        for box in (*self.query(Input), self.query_one("#bits")):
            box.disabled = job.busy


def _field(label: str, widget: Input | Select[str]) -> Horizontal:
    return Horizontal(Label(label), widget, classes="field")


def _in_home(folder: Path) -> str:
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _bits_text(bits: str) -> Select[str]:
    choices = [("4, or by the recipe or the average", ""), *((bits, bits) for bits in BITS)]
    return Select(choices, value=bits, allow_blank=False, id="bits", compact=True)
