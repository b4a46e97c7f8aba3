"""Ctrl+O: choose a model. What is typed narrows the list, or is a folder or an id of its own; Enter loads what is pointed at.

The list is there at once; sizes, fit and speeds come as the disk is read and the engine's process has computed them.
"""

from collections.abc import Callable
from contextlib import suppress

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.css.query import NoMatches
from textual.events import Resize
from textual.widgets import Input, OptionList, Static

from tokamac.app.tui import units
from tokamac.app.tui.downloads import Stage
from tokamac.app.tui.model_rows import detail, head
from tokamac.app.tui.models import is_id
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.removal import Removal
from tokamac.app.tui.screens.dialog import Dialog
from tokamac.app.tui.session import Session
from tokamac.app.tui.shelf import Row
from tokamac.app.tui.stock import Stock
from tokamac.app.tui.widgets.model_list import ModelList

SHORT = 18
"""Rows below which the list needs those of what stands around it."""

GOING = (Stage.WAITING, Stage.RUNNING)


class ModelScreen(Dialog[str]):
    """Shows the stock; the result is the model to use, which may have to be downloaded first."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        # Before the line to type in, which has uses of its own for some of these keys.
        Binding("up", "point(-1)", "Up", id="model.up", show=False, priority=True),
        Binding("down", "point(1)", "Down", id="model.down", show=False, priority=True),
        Binding("pageup,f8", "page(-1)", "Page up", id="model.page_up", show=False, priority=True),
        Binding("pagedown,f9", "page(1)", "Page down", id="model.page_down", show=False, priority=True),
        Binding("f3", "what_if", "What if", id="model.what_if"),
        Binding("f4", "convert", "Convert", id="model.convert"),
        Binding("f5", "download", "Download, pause, resume", id="model.download"),
        Binding("f6", "cancel", "Cancel the download", id="model.cancel"),
        Binding("f7", "unload", "Unload", id="model.unload"),
        Binding("ctrl+d", "remove", "Remove", id="model.remove", priority=True),
    ]

    def __init__(
        self, stock: Stock, session: Session, what_if: Callable[[str], None], unload: Callable[[], None]
    ) -> None:
        super().__init__()
        self._stock = stock
        self._session = session
        self._what_if = what_if
        self._unload = unload
        self._removal = Removal()
        self._afresh = True
        self._said = ""

    def compose(self) -> ComposeResult:
        """Yield the line to type in, the list, and what there is to say of the row that is pointed at."""
        with Vertical(classes="box") as box:
            box.border_title = "Model"
            yield Input(placeholder="filter, a folder, or a Hugging Face id", compact=True)
            yield Static(id="head", markup=False)
            yield ModelList()
            yield Static(id="detail", markup=False)

    def on_mount(self) -> None:
        """List what is known, and look for the rest."""
        self._stock.watcher = self.refresh_rows
        self.refresh_rows()
        self._stock.look()

    def on_unmount(self) -> None:
        """What comes from here on needs no drawing."""
        self._stock.watcher = None

    def on_screen_resume(self) -> None:
        """Ask again: another screen may have asked for something else meanwhile."""
        self._stock.estimates.again()
        if self._stock.looked:
            self._stock.look()

    def on_resize(self, event: Resize) -> None:
        """Set the columns anew."""
        self.set_class(event.size.height < SHORT, "-short")
        self.call_after_refresh(self.refresh_rows)

    # The list -------------------------------------------------------------------------------------------------------------

    @property
    def _list(self) -> ModelList:
        return self.query_one(ModelList)

    @on(Input.Changed)
    def typed(self) -> None:
        """Narrow the list, and point at what fits first."""
        self._removal.forget()
        self._afresh = True
        self.refresh_rows()

    def refresh_rows(self) -> None:
        """Bring the list up to date. Once the user has moved in it, what is pointed at stays pointed at."""
        with suppress(NoMatches):  # the screen is being left: its parts go before it, one after another
            self._refresh_rows()

    def _refresh_rows(self) -> None:
        text = self.query_one(Input).value
        width = self._list.cells
        self.query_one("#head", Static).update(head(width))
        self._list.show(self._stock.rows(text), self._stock, loaded=self._held, afresh=self._afresh)
        self._tell()

    @property
    def _held(self) -> str:
        """The model that the chat uses; nothing while none is loaded."""
        return "" if self._session.phase in (Phase.UNLOADED, Phase.FAILED) else self._session.load.model

    @on(OptionList.OptionHighlighted)
    def pointed(self) -> None:
        """Say what there is to say of the row."""
        if not self._removal.is_for(self._list.pointed):
            self._removal.forget()
            self._said = ""
        self._tell()

    def action_point(self, step: int) -> None:
        """Point at the next row, or the one before; the keyboard stays with the line to type in."""
        self._afresh = False
        self._list.action_cursor_up() if step < 0 else self._list.action_cursor_down()

    def action_page(self, step: int) -> None:
        """Go a page up or down."""
        self._afresh = False
        self._list.page(step)

    # Choosing -------------------------------------------------------------------------------------------------------------

    @on(Input.Submitted)
    def entered(self) -> None:
        """Take what is pointed at."""
        self._take(self._list.pointed)

    @on(OptionList.OptionSelected)
    def picked(self) -> None:
        """Take what was clicked."""
        self._take(self._list.pointed)

    def _take(self, row: Row | None) -> None:
        if row is None:
            return
        if self._removal.is_for(row):
            self.action_remove()
        elif row.download is not None and row.download.stage in GOING:
            self._stock.downloads.start(row.model, loads=True)
            self._say("It is loaded as soon as it is here.")
        else:
            self.dismiss(row.model)

    def _named(self) -> str:
        row = self._list.pointed
        return self._session.load.model if row is None else row.model

    def action_what_if(self) -> None:
        """Ask how the model that is pointed at would run otherwise, or elsewhere."""
        self._what_if(self._named())

    def action_convert(self) -> None:
        """Convert that model; take the result if it is wanted at once."""
        from tokamac.app.tui.screens.convert import ConvertScreen

        self.app.push_screen(ConvertScreen(self._named()), self._converted)

    def _converted(self, folder: str | None) -> None:
        if folder is not None:
            self.dismiss(folder)

    # Changing -------------------------------------------------------------------------------------------------------------

    def action_download(self) -> None:
        """Download what is pointed at; pause it, or let it go on."""
        row = self._list.pointed
        if row is None:
            return
        if row.download is not None and row.download.stage in GOING:
            self._stock.downloads.pause(row.model)
        elif row.download is not None or (not row.on_disk and is_id(row.model)):
            self._stock.downloads.start(row.model)
        else:
            self._say("It is here." if row.on_disk else "A download needs a Hugging Face id, such as org/name.")

    def action_cancel(self) -> None:
        """Give a download up, and what has arrived of it."""
        row = self._list.pointed
        if row is not None and row.download is not None:
            self._stock.downloads.cancel(row.model)
        else:
            self._say("Nothing of it is being downloaded.")

    def action_unload(self) -> None:
        """Give the memory of the loaded model back."""
        self._unload()
        self.refresh_rows()

    def action_remove(self) -> None:
        """Ask, and once asked remove what is pointed at: a model of the cache from the disk, a folder only from this list."""
        row = self._list.pointed
        if row is None:
            return
        if refused := self._removal.refusal(row, self._held):
            self._say(refused)
        elif row.home == "folder":
            self._stock.forget_folder(row.model)
            self.notify("Off the list; the folder is where it was.", markup=False, timeout=4)
        elif self._removal.is_for(row):
            self._removal.forget()
            self._stock.remove(row.model)
            self._say("Removing …")
        else:
            self._removal.ask(row)
            self._say(
                f"Remove {units.size(row.nbytes)} from the disk? Ctrl+D again, or Enter, removes it; Esc keeps it."
            )

    def action_leave(self) -> None:
        """Give up a removal that is asked about, else close."""
        if self._removal.asked:
            self._removal.forget()
            self._say("")
        else:
            self.dismiss(None)

    # What is said ---------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self._said = text
        self._tell()

    def _tell(self) -> None:
        """Show the whole of the row that is pointed at, or what was said, and the keys that do something with the row."""
        row = self._list.pointed
        self.query_one("#detail", Static).update("Nothing fits." if row is None else detail(row, self._said))
        keys = ("Enter removes it", "Esc keeps it") if self._removal.asked else (*self._uses(row), "Esc closes")
        if keys != self._keys:
            self.say_keys(*keys)

    def _uses(self, row: Row | None) -> list[str]:
        """Return what the keys do with a row."""
        if row is None:
            return []
        if row.download is not None and row.download.stage is Stage.FAILED:
            return ["Enter tries again", "F6 gives it up"]
        if row.download is not None:
            going = row.download.stage in GOING
            return [f"F5 {'pauses' if going else 'resumes'}", "F6 cancels", "Enter loads it once it is here"]
        if not row.on_disk and row.home is None and is_id(row.model):
            return ["Enter downloads and loads", "F5 downloads", "F3 what if"]
        if row.model == self._held:
            return ["F7 unloads", "Enter loads again", "F3 what if", "F4 converts"]
        removes = [] if row.home in (None, "embedded") else ["Ctrl+D removes"]
        return ["Enter loads", *removes, "F3 what if", "F4 converts"]
