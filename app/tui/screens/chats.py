"""Ctrl+L: search all chats by title, message and file, by words or meaning. F6: the conversation as a tree."""

# Folders come between pinned and other chats; folding lasts until the app quits. In the tree, messages without
# versions share a column, and each version shows the price of continuing its path.

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.events import Key, Resize
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets import Tree as TreeView
from textual.widgets.option_list import Option
from textual.widgets.tree import TreeNode
from textual.worker import Worker, get_current_worker

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Price, Role

from ...chat.actions import Keymap
from ...chat.background import of_path
from ...chat.conversation import Tree
from ...chat.listing import (
    ChatFolder,
    ChatMatches,
    ChatSearch,
    MeaningSearch,
    ago,
    beside,
    date_of,
    excerpt,
    grouped,
    plain_hit,
    said_in,
)
from ...models.local import short_name
from ...store.values import Hit, StoredChat, StoreError
from ...text.sanitise import sanitise, sanitise_line
from ...text.units import minutes
from ..theme import FAINT
from ..widgets.prompt_input import TextInput
from .dialog import Dialog

LEAST_TITLE = 24  # cells that a title keeps; the rest of a chat's row gives way to it, the ID last: `--chat` takes it
LEAD = 24  # characters before the first match that are shown, so that it is seen in a narrow list too
WHO: dict[Role, str] = {"user": "you: ", "assistant": "", "system": "system: ", "tool": "tool: "}


@dataclass(frozen=True, slots=True)
class Background:
    running: str | None = None
    waiting: tuple[str, ...] = ()

    def mark(self, chat: str) -> str:
        return "writing …" if chat == self.running else "queued" if chat in self.waiting else ""


def chat_row(
    chat: StoredChat, *, is_open: bool, seconds: float, room: int, date: str = "", doing: str = "", folders: bool = True
) -> Content:
    title = sanitise_line(chat.title) or ("draft: " + excerpt(chat.draft) if chat.draft else "untitled")
    here = Content.styled("● ", "$text-primary") if is_open else Content("  ")
    here += Content.styled("★ ", "$text-secondary") if chat.pinned_at is not None else Content("")
    folder = excerpt(chat.folder) if folders and chat.folder else ""
    if folder:
        title = f"{folder} / {title}"
    model, age = short_name(chat.model), doing or ago(seconds)
    longest = [(age, date, model, chat.id), (age, model, chat.id)]
    shorter = [(age, chat.id), (age,)] if doing else [(date or model, model if date else "", chat.id), (chat.id,)]
    choices: list[tuple[str, ...]] = [*longest, *shorter]
    notes = [" · ".join(part for part in parts if part) for parts in choices]
    room -= here.cell_length - 2
    left = room - 2 - min(cell_len(title), LEAST_TITLE)
    note = next((f"  {each}" for each in notes if cell_len(each) + 2 <= left), "")
    row = here + Content(title).truncate(max(room - 2 - cell_len(note), 1), ellipsis=True)
    return row + Content.styled(note, FAINT)


def hit_row(hit: Hit) -> Content:
    hit = plain_hit(hit)
    snippet, end = Content(""), 0
    for begin, stop in hit.marks:
        before = _one_line(hit.snippet[end:begin])
        if end == 0 and len(before) > LEAD:
            before = "…" + before[-LEAD:]
        snippet += Content(before) + Content.styled(_one_line(hit.snippet[begin:stop]), "bold underline $text-primary")
        end = stop
    found = Content("  ") + Content.styled(WHO[hit.role], FAINT) + snippet + Content(_one_line(hit.snippet[end:]))
    file = f"{sanitise_line(hit.file)} in " if hit.file else ""
    near = "" if hit.likeness is None else " · by meaning"
    return found + Content.styled(f"\n      in {file}{sanitise_line(hit.title)}{near}", FAINT)


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", sanitise(text))


LISTING = (
    "Enter opens",
    "Ctrl+E renames",
    "Ctrl+K pins",
    "Ctrl+F folder",
    "Ctrl+D deletes",
    "Ctrl+Z restores",
    "Esc closes",
)
NAMING = ("Enter saves", "Esc cancels")
LOOK_BACKGROUND_S = 0.5  # how often the marks of what goes on in the background are looked at


INDENT = "  "  # before the chats of a folder
Entry = StoredChat | Hit | ChatFolder | None  # what a row is of; None is the heading of a date


def _identity(entry: Entry) -> tuple[type, str] | None:
    match entry:
        case StoredChat():
            return StoredChat, entry.id
        case Hit():
            return Hit, f"{entry.message} {entry.file}"
        case ChatFolder():
            return ChatFolder, entry.name
        case _:
            return None


def _is_of(entry: StoredChat | Hit | ChatFolder, chat: str) -> bool:
    match entry:
        case StoredChat(id=id) | Hit(chat=id):
            return id == chat
        case ChatFolder():
            return False


@dataclass(frozen=True, slots=True)
class Pick:
    chat: str
    message: int | None = None


@dataclass(frozen=True, slots=True)
class SelectedChat:
    chat: str
    title: str
    by_message: bool

    @property
    def name(self) -> str:
        return "the chat of this message" if self.by_message else "the chat"


class DeleteOpen(Message):
    def __init__(self, chat: str, gone: Callable[[], None]) -> None:
        super().__init__()
        self.chat = chat
        self.gone = gone


class ChatsScreen(Dialog[Pick]):
    BINDINGS = [  # noqa: RUF012 (Textual's way)
        Binding("down", "to_list", "List", id="chats.list", show=False),
        # Before the line to type in, which has uses of its own for these keys.
        Binding("ctrl+d", "delete", "Delete", id="chats.delete", priority=True),
        Binding("ctrl+z", "undo", "Undo", id="chats.undo", priority=True),
        Binding("ctrl+e", "rename", "Rename", id="chats.rename", priority=True),
        Binding("ctrl+k", "pin", "Pin", id="chats.pin", priority=True),
        Binding("ctrl+f", "move", "Folder", id="chats.folder", priority=True),
        Binding("ctrl+y", "next_folder", "Next folder", id="chats.next_folder", priority=True),
        Binding("ctrl+g", "meaning", "By meaning", id="chats.meaning", priority=True),
        Binding("left", "fold", "Fold", id="chats.fold", show=False, priority=True),
        Binding("right", "unfold", "Unfold", id="chats.unfold", show=False, priority=True),
    ]

    def __init__(
        self,
        search: ChatSearch,
        open_id: str | None,
        keymap: Keymap,
        clock: Callable[[], float] = time.time,
        *,
        background: Callable[[], Background] = Background,
        changed: Callable[[], bool] = lambda: False,
        folded: set[str] | None = None,
        words: str = "",
        by_meaning: bool = False,
        meaning: Callable[[], MeaningSearch] | None = None,
    ) -> None:
        super().__init__()
        self._by_meaning, self._new_meaning = by_meaning, meaning
        self._meaning: MeaningSearch | None = None
        self._agreed = False  # the price of a search by meaning was told
        self._near: tuple[str, Sequence[Hit]] = ("", ())  # words, and what was found by their meaning
        self._told = ("", "")  # words, and what the search by their meaning says: one by words ends beside it
        self._words = words
        self._folded = set() if folded is None else folded
        self._background = background
        self._changed = changed
        self._doing = background()
        self._folder: str | None = None
        self._moving = False
        self._entries: list[Entry] = []
        self._keymap = keymap
        self._search = search
        self._open_id = open_id
        self._clock = clock
        self._shown: ChatMatches = ChatMatches("", (), ())
        self._deleted: list[str] = []
        self._naming: str | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Chats"
            yield TextInput(
                self._words, placeholder="Search titles, messages, files", select_on_focus=False, compact=True
            )
            yield Static("", id="state", classes="note", markup=False)
            yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        self.say_keys(*LISTING)
        self.find(self._words)
        self.set_interval(LOOK_BACKGROUND_S, self._look)

    def on_unmount(self) -> None:
        if self._meaning is not None:
            self.run_worker(self._meaning.close, thread=True)

    def _look(self) -> None:
        if self._changed() and self._naming is None:
            self.find(self.query_one(Input).value, stays=True)
        if (doing := self._background()) != self._doing:
            self._doing = doing
            self._refill()

    @on(Input.Changed)
    def typed(self, event: Input.Changed) -> None:
        if self._naming is None:
            self.find(event.value)

    @work(thread=True, exclusive=True)
    def find(self, text: str, *, stays: bool = False) -> None:
        asked = get_current_worker()
        try:
            found: ChatMatches | StoreError = self._search.find(text, self._folder)
        except StoreError as error:
            found = error
        self.app.call_from_thread(self._take, asked, found, stays)

    def _take(self, asked: Worker[None], found: ChatMatches | StoreError, stays: bool) -> None:
        if asked.is_cancelled or self._naming is not None or not self.query(OptionList):
            return
        if isinstance(found, StoreError):
            self._say(found.one_line())
        elif (found.text, found.folder) == (self.query_one(Input).value, self._folder):  # else more was typed since
            self._show(found, stays=stays)

    def _show(self, found: ChatMatches, *, stays: bool) -> None:
        same = (found.text, found.folder) == (self._shown.text, self._shown.folder)
        at = self._pointed() if same else None
        known = (
            _identity(self._entries[self.query_one(OptionList).highlighted or 0]) if stays and at is not None else None
        )
        text, near = self._near
        self._shown = replace(found, hits=beside(found.hits, near if found.text == text else ()))
        self._fill(at or 0)
        if known is not None:
            self._point(lambda entry: _identity(entry) == known)
        if at is None:
            first = found.chats[0] if found.chats else None
            self._point(
                lambda entry: (
                    entry == first or (isinstance(entry, ChatFolder) and entry.folded and first in entry.chats)
                )
            )
        self._say(self._state())
        if self._by_meaning:
            self._by_meaning = False
            self.action_meaning()

    def _state(self) -> str:
        found = self._shown
        if found.folder is not None:
            return f"Folder: {sanitise_line(found.folder)} · Ctrl+Y shows the next one"
        if found.text.strip():
            if self._told[0] == found.text:
                return self._told[1]
            said = "Ctrl+G searches by meaning." if self._new_meaning is not None else ""
            return said if found.chats or found.hits else f"No matches. {said}".rstrip()
        if not found.chats:
            return "No chats yet."
        if not found.folders:
            return ""
        many = "1 folder" if len(found.folders) == 1 else f"{len(found.folders)} folders"
        return f"{many} · Left and Right fold one · Ctrl+Y shows one alone"

    def _point(self, wanted: Callable[[Entry], bool]) -> None:
        at = next((at for at, entry in enumerate(self._entries) if wanted(entry)), None)
        if at is not None:
            self.query_one(OptionList).highlighted = at

    def _pointed(self) -> int | None:
        index = self.query_one(OptionList).highlighted
        return None if index is None else sum(each is not None for each in self._entries[:index])

    def _fill(self, at: int | None) -> None:
        listed = self.query_one(OptionList)
        rows = self._rows(self._shown)
        self._entries = [entry for _, entry in rows]
        places = [index for index, entry in enumerate(self._entries) if entry is not None]
        listed.clear_options()
        listed.add_options([Option(row, disabled=entry is None) for row, entry in rows])
        listed.highlighted = places[min(at, len(places) - 1)] if at is not None and places else None

    @on(Resize)
    def resized(self) -> None:
        self.call_after_refresh(self._refill)

    def _refill(self) -> None:
        for listed in self.query(OptionList):  # there is none any more where it was closed meanwhile
            del listed
            self._fill(self._pointed())

    def _rows(self, found: ChatMatches) -> Sequence[tuple[Content, Entry]]:
        listed = self.query_one(OptionList)
        room = listed.content_region.width - listed.styles.scrollbar_size_vertical
        now = self._clock()
        rows: list[tuple[Content, Entry]] = []
        plain, indent = bool(found.text.strip()), ""
        folded = self._folded if found.folder is None else None
        for each in found.chats if plain else grouped(found.chats, now, folded):
            match each:
                case str():
                    rows.append((Content.styled(each, FAINT), None))
                    indent = ""
                case ChatFolder():
                    rows.append((self._folder_row(each), each))
                    indent = INDENT
                case StoredChat():
                    row = chat_row(
                        each,
                        is_open=each.id == self._open_id,
                        seconds=now - each.updated_at,
                        room=room - len(indent),
                        date=date_of(each.updated_at, now),
                        doing=self._doing.mark(each.id),
                        folders=found.folder is None and not indent,
                    )
                    rows.append((indent + row, each))
        return [*rows, *((hit_row(hit), hit) for hit in found.hits)]

    def _folder_row(self, folder: ChatFolder) -> Content:
        name = Content.styled(f"{'▸' if folder.folded else '▾'} {excerpt(folder.name)}", "bold")
        if not folder.folded:
            return name
        here = Content.styled(" ●", "$text-primary") if any(chat.id == self._open_id for chat in folder.chats) else ""
        doing = next(filter(None, (self._doing.mark(chat.id) for chat in folder.chats)), "")
        return name + here + Content.styled(f" ({len(folder.chats)}){f' · {doing}' if doing else ''}", FAINT)

    def _say(self, text: str) -> None:
        state = self.query_one("#state", Static)
        state.update(text)
        state.display = bool(text)

    def action_meaning(self) -> None:
        text = self.query_one(Input).value
        if self._new_meaning is None or self._folder is not None or not text.strip():
            self._say("Write what you look for in all chats, then Ctrl+G finds it by meaning.")
        else:
            self._tell(text, "Searching by meaning …")
            self._find_meaning(text, self._new_meaning)

    def _tell(self, text: str, said: str) -> None:
        self._told = (text, said)
        self._say(said)

    @work(thread=True, exclusive=True, group="meaning")
    def _find_meaning(self, text: str, new: Callable[[], MeaningSearch]) -> None:
        asked, begun = get_current_worker(), time.monotonic()

        def tell(done: int, total: int) -> None:
            if not asked.is_cancelled:
                left = f", {minutes((time.monotonic() - begun) / done * (total - done))} left" if done else ""
                said = f"Reading for the search by meaning: {done:,} of {total:,} passages{left}"
                self.app.call_from_thread(self._tell, text, said)

        try:
            meaning = self._meaning = self._meaning or new()
            if not self._agreed and (price := meaning.price()).is_large:
                self._agreed = True
                self.app.call_from_thread(self._tell, text, f"{price} Ctrl+G again begins.")
                return
            near = meaning.find(text, tell)
        except TokamacError as error:
            if not asked.is_cancelled:
                self.app.call_from_thread(self._tell, text, error.one_line())
            return
        if not asked.is_cancelled:
            self.app.call_from_thread(self._show_near, text, near)

    def _show_near(self, text: str, near: Sequence[Hit]) -> None:
        if self._naming is None and text == self.query_one(Input).value and self.is_mounted:
            self._near = text, near
            self._show(self._shown, stays=True)
            self._point(lambda entry: isinstance(entry, Hit) and entry.likeness is not None)
            more = any(hit.likeness is not None for hit in self._shown.hits)
            self._tell(text, "" if more else "Nothing more by meaning.")

    # Choosing -------------------------------------------------------------------------------------------------------------

    @on(Input.Submitted)
    def entered(self) -> None:
        if self._naming is not None and self._moving:
            self._moved(self._naming, self.query_one(Input).value)
        elif self._naming is not None:
            self._named(self._naming, self.query_one(Input).value)
        elif (index := self.query_one(OptionList).highlighted) is not None:
            self._open(index)

    @on(OptionList.OptionSelected)
    def picked(self, event: OptionList.OptionSelected) -> None:
        self._open(event.option_index)

    def _open(self, index: int) -> None:
        match self._entries[index]:
            case StoredChat(id=chat):
                self.dismiss(Pick(chat))
            case Hit(chat=chat, message=message):
                self.dismiss(Pick(chat, message))
            case ChatFolder(name=name, folded=folded):
                self._fold(name, not folded)

    def _fold(self, name: str, folded: bool) -> None:
        (self._folded.add if folded else self._folded.discard)(name)
        self._fill(self._pointed())
        self._point(lambda entry: isinstance(entry, ChatFolder) and entry.name == name)

    def action_fold(self) -> None:
        match self._entry():
            case ChatFolder(name=name) | StoredChat(folder=name, pinned_at=None) if name:
                self._fold(name, True)

    def action_unfold(self) -> None:
        match self._entry():
            case ChatFolder(name=name):
                self._fold(name, False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """While editing a title, list keys go to the input line; so do Left and Right while it has text."""
        del parameters
        if action in ("fold", "unfold"):
            return self._naming is None and self._folder is None and not self.query_one(Input).value
        return self._naming is None or action not in (
            "delete",
            "meaning",
            "undo",
            "rename",
            "to_list",
            "pin",
            "move",
            "next_folder",
        )

    def on_key(self, event: Key) -> None:
        box = self.query_one(Input)
        if event.is_printable and event.character and not event.character.isspace() and not box.has_focus:
            event.stop()
            box.focus()
            box.cursor_position = len(box.value)
            box.insert_text_at_cursor(event.character)

    def action_to_list(self) -> None:
        self.query_one(OptionList).focus()

    # Changing -------------------------------------------------------------------------------------------------------------

    def _entry(self) -> Entry:
        index = self.query_one(OptionList).highlighted
        return None if index is None else self._entries[index]

    def _selected(self) -> SelectedChat | None:
        match self._entry():
            case StoredChat(id=chat, title=title):
                return SelectedChat(chat, title, by_message=False)
            case Hit(chat=chat, title=title):
                return SelectedChat(chat, title, by_message=True)
        return None

    def action_delete(self) -> None:
        selected = self._selected()
        if selected is None:
            return
        if selected.chat == self._open_id or self._background().mark(selected.chat):
            self.post_message(DeleteOpen(selected.chat, lambda: self._gone(selected.chat)))
        elif self._try(lambda: self._search.delete(selected.chat)):
            self._gone(selected.chat)
            what = f"Deleted {selected.name}: {excerpt(selected.title) or 'untitled'}."
            later = self._keymap.key("restore_chat")
            self.notify(f"{what} Ctrl+Z restores it; once the list is closed, {later} does.", markup=False, timeout=6)

    def _gone(self, chat: str) -> None:
        if chat == self._open_id:
            self._open_id = None
        self._deleted.append(chat)
        self._take_out(chat)
        self.find(self.query_one(Input).value)

    def _take_out(self, chat: str) -> None:
        """Remove a chat's rows immediately, so that the next key doesn't hit them, and select the next."""
        shown, index = self._shown, self.query_one(OptionList).highlighted
        before = [each for each in self._entries[:index] if each is not None and not _is_of(each, chat)]
        chats = tuple(each for each in shown.chats if each.id != chat)
        hits = tuple(hit for hit in shown.hits if hit.chat != chat)
        self._shown = replace(shown, chats=chats, hits=hits)
        self._fill(len(before))

    def action_undo(self) -> None:
        if self._deleted and self._try(lambda: self._search.restore(self._deleted[-1])):
            self._deleted.pop()
            self.find(self.query_one(Input).value)

    def action_rename(self) -> None:
        selected = self._selected()
        if selected is not None:
            self._naming = selected.chat
            box = self.query_one(Input)
            box.value = sanitise_line(selected.title)
            box.cursor_position = len(box.value)
            box.focus()
            self.say_keys(*NAMING)
            self._say(f"New title of {selected.name}; Enter saves it.")

    def _named(self, chat: str, title: str) -> None:
        if not title.strip() or self._try(lambda: self._search.rename(chat, title.strip())):
            self._list_again()

    def action_pin(self) -> None:
        chat = self._entry()
        if not isinstance(chat, StoredChat):
            self._say("Select a chat to pin it, not a message in it or a folder.")
        elif self._try(lambda: self._search.pin(chat.id, pinned=chat.pinned_at is None)):
            self.find(self.query_one(Input).value)

    def action_move(self) -> None:
        selected = self._selected()
        if selected is None:
            return
        known = ", ".join(map(sanitise_line, self._shown.folders))
        chat = next((each for each in self._shown.chats if each.id == selected.chat), None)
        self._naming, self._moving = selected.chat, True
        box = self.query_one(Input)
        box.value = sanitise_line(chat.folder) if chat is not None else ""
        box.cursor_position = len(box.value)
        box.focus()
        self.say_keys(*NAMING)
        there = f" There are: {known}." if known else ""
        self._say(f"Folder of {selected.name}; empty takes it out.{there}")

    def _moved(self, chat: str, folder: str) -> None:
        if self._try(lambda: self._search.move(chat, folder)):
            self._list_again()

    def action_next_folder(self) -> None:
        names: list[str | None] = [None, *self._shown.folders]
        at = names.index(self._folder) if self._folder in names else 0
        self._folder = names[(at + 1) % len(names)]
        if len(names) == 1:
            self._say("There are no folders yet. Ctrl+F puts a chat into one.")
        self.find(self.query_one(Input).value)

    def _list_again(self) -> None:
        self._naming, self._moving = None, False
        self.say_keys(*LISTING)
        self.query_one(Input).value = ""
        self.find("")

    def action_leave(self) -> None:
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
        self._changed()  # here, and not in another window
        return True


WORDS = 60  # characters of a message that are shown
HERE, ELSEWHERE = "● ", "○ "
LOOK_S = 0.2  # how often the versions in view, and the prices that came, are looked at

# Returns the prices known so far, and asks the engine for those of the given messages.
Pricing = Callable[[Sequence[int]], Mapping[int, Price]]


class BranchesScreen(Dialog[int]):
    def __init__(self, tree: Tree, pricing: Pricing) -> None:
        super().__init__()
        self._tree = tree
        self._pricing = pricing
        self._found: dict[int, TreeNode[int]] = {}
        self._priced: set[int] = set()

    def compose(self) -> ComposeResult:
        with Vertical(classes="box") as box:
            box.border_title = "Branches"
            view: TreeView[int] = TreeView("")
            view.show_root = False
            view.auto_expand = False  # Enter goes there
            view.guide_depth = 2
            yield view

    def on_mount(self) -> None:
        view: TreeView[int] = self.query_one(TreeView)
        self._found = fill(view.root, self._tree)
        view.root.expand()
        view.focus()
        if self._tree.head is not None:
            self.call_after_refresh(view.move_cursor, self._found[self._tree.head])
        self.set_interval(LOOK_S, self._look)
        self.say_keys("Enter switches to it", "Space folds", "● is on screen", "Esc closes")

    def _look(self) -> None:
        for key, price in self._pricing(self._in_view()).items():
            if key not in self._priced:
                self._priced.add(key)
                self._found[key].set_label(line(self._tree, key, here=self._is_read(key), price=price))

    def _in_view(self) -> list[int]:
        view: TreeView[int] = self.query_one(TreeView)
        top = view.scroll_offset.y
        nodes = (view.get_node_at_line(row) for row in range(top, top + view.size.height))
        keys = (node.data for node in nodes if node is not None)
        return [key for key in keys if key is not None and self._tree.place(key)[1] > 1]

    def _is_read(self, key: int) -> bool:
        return any(node.key == key for node in self._tree.path_to(self._tree.head))

    @on(TreeView.NodeSelected)
    def chosen(self, event: TreeView.NodeSelected[int]) -> None:
        if event.node.data is not None:
            self.dismiss(event.node.data)


def fill(root: TreeNode[int], tree: Tree) -> dict[int, TreeNode[int]]:
    read = {node.key for node in tree.path_to(tree.head)}
    made: dict[int, TreeNode[int]] = {}
    todo: list[tuple[TreeNode[int], int | None]] = [(root, None)]
    while todo:  # a loop: a path may have more versions on it than Python has stack
        holder, at = todo.pop()
        while len(after := tree.children(at)) == 1:
            at = after[0]
            made[at] = holder.add_leaf(line(tree, at, here=at in read), data=at)
        for key in after:
            goes_on = bool(tree.children(key))
            made[key] = holder.add(line(tree, key, here=key in read), data=key, expand=True, allow_expand=goes_on)
            todo.append((made[key], key))
    return made


def line(tree: Tree, key: int, *, here: bool, price: Price | None = None) -> Text:
    (number, many), (who, said) = tree.place(key), said_in(tree.nodes[key], WORDS)
    version = f" ‹{number} of {many}›" if many > 1 else ""
    return Text.assemble(
        HERE if here else ELSEWHERE,
        (f"{who}{version}", "bold" if here else ""),
        ("" if price is None else f" · {of_path(price)}", "dim"),
        (f"  {said}", "" if here else "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
