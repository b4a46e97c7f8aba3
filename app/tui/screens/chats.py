"""Ctrl+L: every conversation, by title and by what was said in it. What is typed narrows the list."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.errors import StoreError
from tokamac.app.store.values import Chat, Hit
from tokamac.app.tui.keymap import Keymap
from tokamac.app.tui.listing import Found, Library, ago, excerpt, flat
from tokamac.app.tui.screens.dialog import Dialog

FAINT = "$foreground 55%"


@dataclass(frozen=True, slots=True)
class Pick:
    """What was chosen: a chat, and the message to jump to where it was found by what was said.."""

    chat: str
    message: int | None = None


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
            box.border_subtitle = "Enter opens · Ctrl+E renames · Ctrl+D deletes · Ctrl+Z brings back · Esc closes"
            yield Input(placeholder="Filter titles, search what was said", compact=True)
            yield Static("", id="state", classes="note", markup=False)
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        """List all of them."""
        self.find("")

    @on(Input.Changed)
    def typed(self, event: Input.Changed) -> None:
        """Narrow the list."""
        if self._naming is None:
            self.find(event.value)

    @work(thread=True, exclusive=True)
    def find(self, text: str) -> None:
        """Ask the store, aside: typing goes on meanwhile."""
        try:
            found = self._library.find(text)
        except StoreError as error:
            self.app.call_from_thread(self._say, error.one_line())
        else:
            self.app.call_from_thread(self._show, found)

    def _show(self, found: Found) -> None:
        if self._naming is not None or found.text != self.query_one(Input).value:
            return  # more was typed since
        self._shown = found
        listed = self.query_one(OptionList)
        listed.clear_options()
        listed.add_options([Option(line) for line in self._lines(found)])
        if found.chats or found.hits:
            listed.highlighted = 0
        self._say("" if found.chats or found.hits else "Nothing was said so." if found.text.strip() else "No chat yet.")

    def _lines(self, found: Found) -> Sequence[Content]:
        return [*(self._chat_line(chat) for chat in found.chats), *(self._hit_line(hit) for hit in found.hits)]

    def _chat_line(self, chat: Chat) -> Content:
        title = sanitise_line(chat.title) or ("draft: " + excerpt(chat.draft) if chat.draft else "untitled")
        here = Content.styled("● ", "$primary") if chat.id == self._held else Content("  ")
        model = sanitise_line(chat.model).rpartition("/")[2]
        note = f"  {ago(self._clock() - chat.updated_at)} · {model} · {chat.id}"
        return here + Content(title) + Content.styled(note, FAINT)

    def _hit_line(self, hit: Hit) -> Content:
        snippet = Content("")
        end = 0
        for begin, stop in hit.marks:
            snippet += Content(flat(hit.snippet[end:begin])) + Content.styled(
                flat(hit.snippet[begin:stop]), "bold $primary"
            )
            end = stop
        snippet += Content(flat(hit.snippet[end:]))
        said = Content.styled("you: " if hit.role == "user" else "", FAINT)
        return "  " + said + snippet + Content.styled(f"  in {sanitise_line(hit.title)}", FAINT)

    def _say(self, text: str) -> None:
        state = self.query_one("#state", Static)
        state.update(text)
        state.display = bool(text)

    # Choosing -------------------------------------------------------------------------------------------------------------

    @on(Input.Submitted)
    def entered(self) -> None:
        """Open what is first, or take the new title."""
        if self._naming is not None:
            self._named(self.query_one(Input).value)
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

    def action_to_list(self) -> None:
        """Go to the list."""
        self.query_one(OptionList).focus()

    # Changing -------------------------------------------------------------------------------------------------------------

    def _pointed(self) -> Chat | None:
        index = self.query_one(OptionList).highlighted
        return self._shown.chats[index] if index is not None and index < len(self._shown.chats) else None

    def action_delete(self) -> None:
        """Delete the chat that is pointed at; it can be brought back."""
        chat = self._pointed()
        if chat is None:
            return
        if chat.id == self._held:
            self._say(f"This chat is open: start a new one first ({self._keymap.key('new_chat')}).")
            return
        if self._try(lambda: self._library.delete(chat.id)):
            self._deleted.append(chat.id)
            self.find(self.query_one(Input).value)
            self.notify("Deleted. Ctrl+Z brings it back.", markup=False, timeout=4)

    def action_undo(self) -> None:
        """Bring back the chat that was deleted last."""
        if self._deleted and self._try(lambda: self._library.bring_back(self._deleted[-1])):
            self._deleted.pop()
            self.find(self.query_one(Input).value)

    def action_rename(self) -> None:
        """Ask for another title."""
        chat = self._pointed()
        if chat is not None:
            self._naming = chat.id
            box = self.query_one(Input)
            box.value = chat.title
            box.focus()
            self._say("The new title; Enter takes it.")

    def _named(self, title: str) -> None:
        chat, self._naming = self._naming, None
        if chat is not None and title.strip():
            self._try(lambda: self._library.rename(chat, title.strip()))
        self.query_one(Input).value = ""
        self.find("")

    def action_leave(self) -> None:
        """Give up a new title, else close."""
        if self._naming is not None:
            self._naming = None
            self.query_one(Input).value = ""
            self.find("")
        else:
            self.dismiss(None)

    def _try(self, change: Callable[[], object]) -> bool:
        try:
            change()
        except StoreError as error:
            self._say(error.one_line())
            return False
        return True
