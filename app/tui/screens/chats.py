"""Ctrl+L: every conversation, by title and by what was said in it. What is typed narrows the list."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option
from textual.worker import Worker, get_current_worker

from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.errors import StoreError
from tokamac.app.tui.chat_rows import chat_row, hit_row
from tokamac.app.tui.keymap import Keymap
from tokamac.app.tui.listing import Found, Library, excerpt
from tokamac.app.tui.screens.dialog import Dialog

LISTING = ("Enter opens", "Ctrl+E renames", "Ctrl+D deletes", "Ctrl+Z brings back", "Esc closes")
NAMING = ("Enter takes it", "Esc gives it up")


@dataclass(frozen=True, slots=True)
class Pick:
    """What was chosen: a chat, and the message to jump to where it was found by what was said."""

    chat: str
    message: int | None = None


@dataclass(frozen=True, slots=True)
class Pointed:
    """The chat that a row is of. said: the row is a message that was found, and the chat the one it was said in."""

    chat: str
    title: str
    said: bool

    @property
    def name(self) -> str:
        """What a text that says something of the chat calls it."""
        return "the chat in which this was said" if self.said else "the chat"


class DeleteOpen(Message):
    """The conversation that is open is to be deleted, which only who holds it can do. gone: to be called once it is."""

    def __init__(self, chat: str, gone: Callable[[], None]) -> None:
        super().__init__()
        self.chat = chat
        self.gone = gone


class ChatsScreen(Dialog[Pick]):
    """Lists and searches; deletes, brings back, renames. The result is what to open."""

    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("down", "to_list", "List", id="chats.list", show=False),
        # Before the line to type in, which has uses of its own for these keys.
        Binding("ctrl+d", "delete", "Delete", id="chats.delete", priority=True),
        Binding("ctrl+z", "undo", "Undo", id="chats.undo", priority=True),
        Binding("ctrl+e", "rename", "Rename", id="chats.rename", priority=True),
    ]

    def __init__(
        self, library: Library, held: str | None, keymap: Keymap, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__()
        self._keymap = keymap
        self._library = library
        self._held = held
        self._clock = clock
        self._shown: Found = Found("", (), ())
        self._deleted: list[str] = []
        self._naming: str | None = None

    def compose(self) -> ComposeResult:
        """Yield the line to type in and the list."""
        with Vertical(classes="box") as box:
            box.border_title = "Conversations"
            yield Input(placeholder="Filter titles, search what was said", compact=True)
            yield Static("", id="state", classes="note", markup=False)
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        """List all of them."""
        self.say_keys(*LISTING)
        self.find("")

    @on(Input.Changed)
    def typed(self, event: Input.Changed) -> None:
        """Narrow the list."""
        if self._naming is None:
            self.find(event.value)

    @work(thread=True, exclusive=True)
    def find(self, text: str) -> None:
        """Ask the store, aside: typing goes on meanwhile."""
        asked = get_current_worker()
        try:
            found: Found | StoreError = self._library.find(text)
        except StoreError as error:
            found = error
        self.app.call_from_thread(self._take, asked, found)

    def _take(self, asked: Worker[None], found: Found | StoreError) -> None:
        """Show the store's answer, unless it was asked again since, as after a deletion, or nothing is listed now."""
        if asked.is_cancelled or self._naming is not None or not self.query(OptionList):
            return
        if isinstance(found, StoreError):
            self._say(found.one_line())
        elif found.text == self.query_one(Input).value:  # else more was typed since
            self._show(found)

    def _show(self, found: Found) -> None:
        """Show what was found. While the same is looked for, the row that is pointed at stays where it is."""
        pointed = self.query_one(OptionList).highlighted if found.text == self._shown.text else None
        self._shown = found
        self._fill(pointed or 0)
        self._say("" if found.chats or found.hits else "Nothing was said so." if found.text.strip() else "No chat yet.")

    def _fill(self, pointed: int | None) -> None:
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options([Option(row) for row in self._rows(self._shown)])
        listed.highlighted = pointed

    @on(Resize)
    def resized(self) -> None:
        """Write the rows for the room there is now."""
        self.call_after_refresh(self._refill)

    def _refill(self) -> None:
        for listed in self.query(OptionList):  # there is none any more where it was closed meanwhile
            self._fill(listed.highlighted)

    def _rows(self, found: Found) -> Sequence[Content]:
        listed = self.query_one(OptionList)
        room = listed.content_region.width - listed.styles.scrollbar_size_vertical
        now = self._clock()
        chats = (
            chat_row(chat, held=chat.id == self._held, seconds=now - chat.updated_at, room=room) for chat in found.chats
        )
        return [*chats, *map(hit_row, found.hits)]

    def _say(self, text: str) -> None:
        state = self.query_one("#state", Static)
        state.update(text)
        state.display = bool(text)

    # Choosing -------------------------------------------------------------------------------------------------------------

    @on(Input.Submitted)
    def entered(self) -> None:
        """Open what is first, or take the new title."""
        if self._naming is not None:
            self._named(self._naming, self.query_one(Input).value)
        elif (index := self.query_one(OptionList).highlighted) is not None:
            self._open(index)

    @on(OptionList.OptionSelected)
    def picked(self, event: OptionList.OptionSelected) -> None:
        """Open what is pointed at."""
        self._open(event.option_index)

    def _open(self, index: int) -> None:
        chats, hits = self._shown.chats, self._shown.hits
        if index < len(chats):
            self.dismiss(Pick(chats[index].id))
        else:
            hit = hits[index - len(chats)]
            self.dismiss(Pick(hit.chat, hit.message))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While a title is written, the keys of the list are those of the line that it is typed in."""
        del parameters
        return self._naming is None or action not in ("delete", "undo", "rename", "to_list")

    def action_to_list(self) -> None:
        """Go to the list."""
        self.query_one(OptionList).focus()

    # Changing -------------------------------------------------------------------------------------------------------------

    def _pointed(self) -> Pointed | None:
        index, chats = self.query_one(OptionList).highlighted, self._shown.chats
        if index is None:
            return None
        if index < len(chats):
            return Pointed(chats[index].id, chats[index].title, said=False)
        hit = self._shown.hits[index - len(chats)]
        return Pointed(hit.chat, hit.title, said=True)

    def action_delete(self) -> None:
        """Delete the chat that is pointed at, or in which the message was said; it can be brought back."""
        pointed = self._pointed()
        if pointed is None:
            return
        if pointed.chat == self._held:
            self.post_message(DeleteOpen(pointed.chat, lambda: self._gone(pointed.chat)))
        elif self._try(lambda: self._library.delete(pointed.chat)):
            self._gone(pointed.chat)
            what = f"Deleted {pointed.name}: {excerpt(pointed.title) or 'untitled'}."
            later = self._keymap.key("restore_chat")
            self.notify(f"{what} Ctrl+Z brings it back; once the list is closed, {later}.", markup=False, timeout=6)

    def _gone(self, chat: str) -> None:
        """Know that a chat is deleted, and list the others."""
        if chat == self._held:
            self._held = None
        self._deleted.append(chat)
        self._take_out(chat)
        self.find(self.query_one(Input).value)

    def _take_out(self, chat: str) -> None:
        """Take a chat's rows out at once, so that the next key is not for them again; point at the row that was after them."""
        shown, pointed = self._shown, self.query_one(OptionList).highlighted
        of = [*(each.id for each in shown.chats), *(hit.chat for hit in shown.hits)]
        chats = tuple(each for each in shown.chats if each.id != chat)
        hits = tuple(hit for hit in shown.hits if hit.chat != chat)
        self._shown = Found(shown.text, chats, hits)
        self._fill(sum(each != chat for each in of[:pointed]))

    def action_undo(self) -> None:
        """Bring back the chat that was deleted last."""
        if self._deleted and self._try(lambda: self._library.bring_back(self._deleted[-1])):
            self._deleted.pop()
            self.find(self.query_one(Input).value)

    def action_rename(self) -> None:
        """Ask for another title of the chat that is pointed at, or in which the message was said."""
        pointed = self._pointed()
        if pointed is not None:
            self._naming = pointed.chat
            box = self.query_one(Input)
            box.value = sanitise_line(pointed.title)
            box.cursor_position = len(box.value)
            box.focus()
            self.say_keys(*NAMING)
            self._say(f"The new title of {pointed.name}; Enter takes it.")

    def _named(self, chat: str, title: str) -> None:
        """Give ``chat`` the title that was written; one that is refused stays to be written otherwise."""
        if not title.strip() or self._try(lambda: self._library.rename(chat, title.strip())):
            self._list_again()

    def _list_again(self) -> None:
        """List all chats again: no title is written any more."""
        self._naming = None
        self.say_keys(*LISTING)
        self.query_one(Input).value = ""
        self.find("")

    def action_leave(self) -> None:
        """Give up a new title, else close."""
        if self._naming is not None:
            self._list_again()
        else:
            self.dismiss(None)

    def _try(self, change: Callable[[], object]) -> bool:
        try:
            change()
        except StoreError as error:
            self._say(error.one_line())
            return False
        return True
