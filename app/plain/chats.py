"""Plain commands about whole conversations: begin, list, open, name, delete, copy, carry out and in."""

import time
from pathlib import Path

from tokamac.app.plain.interrupts import unbroken
from tokamac.app.plain.repl import Repl
from tokamac.app.store.errors import StoreError
from tokamac.app.store.store import Store
from tokamac.app.store.values import Chat
from tokamac.app.tui import deleting
from tokamac.app.tui.digits import whole_number
from tokamac.app.tui.listing import ago, excerpt, part
from tokamac.app.tui.own import Own
from tokamac.app.tui.recording import LEFT, Recording

NOT_KEPT = StoreError("Chats are not kept", "The reason was said at the start.")
NOTHING_YET = StoreError("Nothing was said yet", "Ask something first.")
MOST_LISTED = 20


def new(repl: Repl, _: str) -> None:
    """Begin another conversation; this one is kept."""
    if _begin(repl):
        repl.console.note(LEFT)
    repl.console.note("New chat. The model stays loaded.")


@unbroken()
def _begin(repl: Repl) -> bool:
    """Leave the conversation for a new one; return whether what was not sent stays with it."""
    driver, unsent, unkept = repl.driver, repl.composer.unsent, repl.keep_draft()
    driver.memory.hold(Own(), driver.session)
    driver.perform(driver.session.new_chat())
    repl.composer.hold(unkept)
    return bool(unsent.whole) and not unkept.whole


def listed(repl: Repl, words: str) -> None:
    """List the chats that were used last, or those in which the words were said."""
    store, now = _recording(repl).store, time.time()
    chats = store.chats(words, limit=MOST_LISTED)
    lines = [f"{chat.title or 'untitled'}, {ago(now - chat.updated_at)} ({chat.id})" for chat in chats]
    repl.listed = tuple(chat.id for chat in chats)
    if words:
        hits = store.search(words, MOST_LISTED)
        lines += [f"{hit.title}, {hit.role}: {part(hit)} ({hit.chat})" for hit in hits]
        repl.listed += tuple(hit.chat for hit in hits)
    numbered = [f"{number}. {line}" for number, line in enumerate(lines, 1)]
    repl.console.say("\n".join(numbered) if numbered else "No chat is kept yet." if not words else "Nothing was found.")
    if numbered:
        repl.console.aside("/open and a number, or an id, opens one.")


def opened(repl: Repl, name: str) -> None:
    """Open a chat by its number in the last list, or by its id."""
    store = _recording(repl).store
    if not name:
        repl.console.note("Write the number of a chat, or its id, after the command: /open 1. /chats lists them.")
        return
    repl.open(_named(repl, store, name).id)


def _named(repl: Repl, store: Store, name: str) -> Chat:
    """Return a chat by its number in the last list, or by its id. Raises StoreError.

    A number beyond the list may be a whole id. It is never the beginning of one: another chat would be meant by mistake.
    """
    if (number := whole_number(name)) is None:
        return store.chat(name)
    if 0 < number <= len(repl.listed):
        return store.chat(repl.listed[number - 1])
    if (chat := store.known(name)) is None:
        raise StoreError(f"There is no number {name} in the last list", "/chats lists them.")
    return chat


def delete(repl: Repl, name: str) -> None:
    """Delete this chat, which then begins anew, or another one."""
    recording = _recording(repl)
    store, held = recording.store, recording.chat
    if not name and held is None:
        repl.console.note("There is nothing to delete yet.")
        return
    chat = _named(repl, store, name) if name else store.chat(held or "")
    said = deleting.delete(recording, chat, lambda: _begin(repl), title=_titled(chat), back="/restore")
    repl.console.note(said.text)


def restore(repl: Repl, name: str) -> None:
    """Bring back the chat that was deleted last, or another one, and open it."""
    store = _recording(repl).store
    chat = _named(repl, store, name) if name else store.last_deleted()
    repl.console.note(deleting.restore(store, chat, repl.open, title=_titled).text)


def _titled(chat: Chat) -> str:
    return f"{excerpt(chat.title or chat.draft) or 'untitled'} ({chat.id})"


def title(repl: Repl, text: str) -> None:
    """Give the conversation a title."""
    recording = _recording(repl)
    if recording.chat is None:
        raise NOTHING_YET
    if not text:
        repl.console.note("Write the title after the command: /title Keys and values")
        return
    if recording.retitle(text):
        repl.console.note("The chat has another title.")


def fork(repl: Repl, _: str) -> None:
    """Go on in a copy; this chat stays as it is."""
    recording, head = _recording(repl), repl.driver.session.talk.tree.head
    stored = None if head is None else recording.stored(head)
    if recording.chat is None or stored is None:
        raise NOTHING_YET
    repl.open(recording.store.fork(recording.chat, stored).id)
    repl.console.note("This is a copy: the chat it comes from stays as it is.")


def export(repl: Repl, written: str) -> None:
    """Write the conversation to a new file."""
    from tokamac.app.export import formats

    recording = _recording(repl)
    lacking = recording.lacking()
    if recording.chat is None:
        raise NOTHING_YET
    archive = recording.store.archive(recording.chat)
    path = Path(written).expanduser() if written else formats.free_name(archive.chat.title, Path())
    formats.export(archive, path)
    repl.console.note(f"Exported to {path}. {lacking}".strip())


def imported(repl: Repl, written: str) -> None:
    """Make a new chat of a file, and open it."""
    from tokamac.app.export.incoming import bring

    store = _recording(repl).store
    if not written:
        repl.console.note("Write the file after the command: /import chat.md (or .json)")
        return
    repl.open(store.adopt(bring(Path(written).expanduser(), now=time.time())).id)


def _recording(repl: Repl) -> Recording:
    """Return what keeps the chats. Raises StoreError where nothing does."""
    if repl.driver.recording is None:
        raise NOT_KEPT
    return repl.driver.recording
