"""Conversations out into files, and in again. Files are read and written aside: the screen goes on meanwhile."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from textual.notifications import SeverityLevel

from tokamac.app.sanitise import sanitise_line
from tokamac.app.store.errors import StoreError
from tokamac.app.store.store import Store
from tokamac.app.tui.widgets.prompt import Prompt
from tokamac.app.tui.wishes.conversation import NOT_KEPT, open_chat

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen


def export(chat: "ChatScreen", written: str) -> None:
    """Write the conversation into a new file: the one that is named, or one named after the title."""
    recording = chat.recording
    if recording is None:
        chat.notify(NOT_KEPT, severity="warning", markup=False)
    elif not chat.session.turns:
        chat.notify("There is nothing to export yet.", markup=False, timeout=3)
    elif chat.session.replying:
        stops = chat.session.keymap.key("stop")
        chat.notify(f"A reply is being written: wait, or stop it with {stops}, then export.", markup=False, timeout=4)
    else:
        file, lacking, name = recording.store.file, recording.lacking(), recording.chat
        path = Path(written).expanduser() if written else None
        if name is None:
            chat.notify(
                "Nothing of this chat is saved, so there is nothing to export.", severity="warning", markup=False
            )
        else:
            chat.run_worker(lambda: _write(chat, file, name, path, lacking), thread=True, group="files")


def _write(chat: "ChatScreen", file: Path, name: str, path: Path | None, lacking: str) -> None:
    """Export what is stored. lacking: what to say of that which is not; or nothing."""
    from tokamac.app.export import formats

    try:
        with Store.open(file) as store:
            archive = store.archive(name)
        path = path or Path.cwd() / formats.free_name(archive.chat.title, Path.cwd()).name
        formats.check_suffix(path)
        if path.exists():
            chat.app.call_from_thread(_ask_again, chat, path)
            return
        formats.export(archive, path)
    except StoreError as error:
        chat.app.call_from_thread(_refuse, chat, error)
    else:
        said = f"Exported to {sanitise_line(str(path))}. {lacking}".strip()
        grave: SeverityLevel = "warning" if lacking else "information"
        chat.app.call_from_thread(chat.notify, said, severity=grave, markup=False, timeout=8)


def _ask_again(chat: "ChatScreen", path: Path) -> None:
    """Put a name that is free into the prompt."""
    from tokamac.app.export.formats import free_name

    free = free_name(path.stem, path.parent, path.suffix)
    chat.query_one(Prompt).give_back(f"/export {sanitise_line(str(free))}")
    said = f"{sanitise_line(path.name)} exists and is not replaced: Enter takes the name in the box, or another."
    chat.notify(said, severity="warning", markup=False, timeout=8)


def import_(chat: "ChatScreen", written: str) -> None:
    """Make a new chat of a file, and open it."""
    recording = chat.recording
    if recording is None:
        chat.notify(NOT_KEPT, severity="warning", markup=False)
    elif not written:
        chat.notify("Write the file after the command: /import chat.md (or .json)", markup=False, timeout=5)
    else:
        file, path = recording.store.file, Path(written).expanduser()
        chat.run_worker(lambda: _read(chat, file, path), thread=True, group="files")


def _read(chat: "ChatScreen", file: Path, path: Path) -> None:
    from tokamac.app.export.incoming import bring
    from tokamac.app.tui.screens.chats import Pick

    try:
        archive = bring(path, now=time.time())
        with Store.open(file) as store:
            made = store.adopt(archive)
    except StoreError as error:
        chat.app.call_from_thread(_refuse, chat, error)
    else:
        chat.app.call_from_thread(open_chat, chat, Pick(made.id))


def _refuse(chat: "ChatScreen", error: StoreError) -> None:
    chat.notify(error.one_line(), severity="error", markup=False, timeout=10)
