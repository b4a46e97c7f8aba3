"""What the actions do (app/chat/actions.py says it of each): a function over the chat and the text after the slash command.

What can't be done raises a ``TokamacError``, which ``do`` tells.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.errors import TokamacError
from tokamac.engine.files import exists, expanded

from .. import own_files
from .. import prompt_files as files
from ..backend.processes import ShellError, working_folder
from ..backend.protocol import Load
from ..models.local import hub_cache, lasting, must_be_downloaded, shown_name
from ..store.store import Store
from ..store.values import Attachment, StoredChat, StoreError
from ..text.sanitise import sanitise, sanitise_line
from ..tools.calls import Line, ToolError
from ..tools.changes import FileChange, apply
from . import setup, versions
from .actions import by_slash
from .attachments import Draft, attachment
from .controller import ChatController, RefusedError, UserChoice, recording_of
from .conversation import Turn
from .figures import listed
from .listing import excerpt
from .recording import LEFT
from .settings_form import whole_number
from .steps import DraftReturned

if TYPE_CHECKING:
    from ..export import Looked
    from ..text.markdown import OpenableLink


def _titled(chat: ChatController, stored: StoredChat) -> str:
    title = excerpt(stored.title or stored.draft) or "untitled"
    return f"{title} ({stored.id})" if chat.lines else title


# Conversations ------------------------------------------------------------------------------------------------------------


def new_chat(chat: ChatController, _: str) -> None:
    if chat.session.turns or chat.lines:
        chat.view.tell("New chat. The model stays loaded.")
    if chat.begin_new():
        chat.view.tell(LEFT)


def private(chat: ChatController, _: str) -> None:
    begins = not chat.private
    chat.be_private(private=begins)
    kept = "neither the chat, nor the prompt cache on disk, nor what you type"
    ends = "/private or quitting forgets it" if begins else ""
    chat.view.tell(f"Private chat: nothing is kept, {kept}. {ends}." if begins else "The private chat is forgotten.")


def title(chat: ChatController, text: str) -> None:
    recording = recording_of(chat)
    if recording.chat is None:
        raise RefusedError("This chat has no messages yet, so it can't have a title.")
    if not text:
        raise RefusedError("Write the title after the command: /title Keys and values")
    if recording.retitle(text):
        chat.view.tell("Chat renamed.")


def pin(chat: ChatController, name: str) -> None:
    """Pin the chat ``name``, or the open one; a pinned one is pinned no longer."""
    recording = recording_of(chat)
    if not (wanted := name or recording.chat):
        raise RefusedError("This chat has no messages yet, so it can't be pinned.")
    found = chat.find_chat(wanted) if name else recording.store.chat(wanted)
    pinned = recording.store.pin(found.id, pinned=found.pinned_at is None).pinned_at is not None
    chat.view.tell(f"{'Pinned' if pinned else 'No longer pinned'}: {_titled(chat, found)}.")


def folder(chat: ChatController, name: str) -> None:
    """Move the open chat to the folder ``name``, or say which there are."""
    recording = recording_of(chat)
    if not name:
        known = [f"{sanitise_line(each)} ({count})" for each, count in recording.store.folders()]
        chat.view.show(
            f"Folders: {', '.join(known)}." if known else "There are no folders yet. /folder NAME makes one."
        )
        return
    if recording.chat is None:
        raise RefusedError("This chat has no messages yet, so it can't be in a folder.")
    moved = recording.store.move(recording.chat, "" if name.lower() == "none" else name)
    chat.view.tell(
        f"Moved to the folder {sanitise_line(moved.folder)}." if moved.folder else "Taken out of its folder."
    )


def delete_chat(chat: ChatController, name: str) -> None:
    recording = recording_of(chat)
    if not (wanted := name or recording.chat):
        raise RefusedError("There is nothing to delete yet.")
    found = chat.find_chat(wanted) if name else recording.store.chat(wanted)
    delete(chat, found, back=chat.session.keymap.key("restore_chat"))


def delete(chat: ChatController, stored: StoredChat, *, back: str) -> None:
    """Delete ``chat``; the open one once another has begun. back: what restores it. Raises TokamacError."""
    recording = recording_of(chat)
    if stored.deleted_at is not None:
        chat.view.tell(f"This chat is already deleted. /restore {stored.id} restores it.")
    elif stored.id != recording.chat and (stored.id == recording.running or stored.id in recording.waiting):
        stops = chat.session.keymap.key("stop")
        raise RefusedError(f"A reply is running or queued in this chat: wait, or stop it with {stops}, then delete.")
    elif stored.id != recording.chat:
        recording.store.delete(stored.id)
        chat.view.tell(f"Deleted: {_titled(chat, stored)}. {back} restores it.")
    elif chat.session.replying:
        raise RefusedError(f"A reply is running: wait, or stop it with {chat.session.keymap.key('stop')}, then delete.")
    elif chat.session.queued:  # it would be sent in the background, which restores the chat
        takes_back = chat.session.keymap.key("earlier")
        raise RefusedError(f"A prompt is queued in this chat: wait, or take it back with {takes_back}, then delete.")
    elif recording.missing():  # after another try
        raise RefusedError("Part of this chat could not be saved. If you delete it now, that part is lost.")
    else:
        unsent = chat.begin_new()  # before it is deleted: what is still to be written of a chat would restore it
        recording.store.delete(stored.id)
        draft = " with your unsent prompt" if unsent else ""
        chat.view.tell(f"Deleted: {_titled(chat, stored)}. This is a new chat. {back} restores the old one{draft}.")


def restore_chat(chat: ChatController, name: str) -> None:
    store = recording_of(chat).store
    found = chat.find_chat(name) if name else store.last_deleted()
    if found is None:
        chat.view.tell("No chat is deleted.")
    elif found.deleted_at is None:
        chat.view.tell(f"This chat is not deleted. /open {found.id} opens it.")
    else:
        store.undelete(found.id)
        chat.open_chat(found.id)
        chat.view.tell(f"Restored: {_titled(chat, found)}.")


def fork(chat: ChatController, _: str) -> None:
    recording, node = recording_of(chat), chat.selected()
    stored = None if node is None else recording.stored(node.key)
    if recording.chat is None or stored is None:
        raise RefusedError("There is no message to fork yet.")
    chat.open_chat(recording.store.fork(recording.chat, stored).id)
    chat.view.tell("This is a copy. The original chat is unchanged.")


def open_(chat: ChatController, name: str) -> None:
    recording_of(chat)
    if name:
        stored, message = chat.find_place(name)
        open_at(chat, stored.id, message)
    else:
        chat.view.open("open")


def open_at(chat: ChatController, stored: str, message: int | None) -> None:
    """Open a chat, at a message of whichever branch. Raises StoreError, RefusedError."""
    chat.open_chat(stored)
    if message is not None:
        jump(chat, recording_of(chat).key_of(message))


def jump(chat: ChatController, key: int | None) -> None:
    """Show and select a message of the chat; None: one that this window does not know."""
    tree = chat.session.conversation.tree
    if key is None or key not in tree.nodes:
        chat.view.tell("This message was added in another window. Open the chat again.")
        return
    if key not in {node.key for node in tree.path_to(tree.head)}:
        chat.perform(chat.session.show_path(key))
    chat.view.open("messages", str(key))


def import_(chat: ChatController, written: str) -> None:
    file = recording_of(chat).file
    if not written:
        raise RefusedError("Write the file after the command: /import chat.md (or .json)")
    chat.view.aside(lambda: _imported(chat, file, written))


def _imported(chat: ChatController, file: Path, written: str) -> Callable[[], None]:
    from ..export import bring_all

    try:
        with Store.open(file) as store:
            made, said = bring_all(store, expanded(written), now=time.time())
    except StoreError as error:
        return partial(chat.view.tell, error.one_line(), "error")
    if len(made) == 1:
        return lambda: chat.open_chat(made[0].id)
    return lambda: chat.view.tell(f"{said} {chat.session.keymap.key('chats')} lists them.")


def export(chat: ChatController, written: str) -> None:
    recording = recording_of(chat)
    if not chat.session.turns:
        raise RefusedError("There is nothing to export yet.")
    if chat.session.replying:
        raise RefusedError(f"A reply is running: wait, or stop it with {chat.session.keymap.key('stop')}, then export.")
    missing = recording.missing()
    if (stored := recording.chat) is None:
        raise RefusedError("This chat could not be saved, so it can't be exported.")
    path = expanded(written) if written else None
    tokens = {recording.stored(key): each for key, each in chat.session.conversation.looked.items()}
    looked = {key: each for key, each in tokens.items() if key is not None}
    chat.view.aside(lambda: _exported(chat, (recording.file, stored, looked), path, missing))


def _exported(
    chat: ChatController, source: "tuple[Path, str, Looked]", path: Path | None, missing: str
) -> Callable[[], None]:
    """Write the file. missing: a sentence on what is not stored, or nothing."""
    from ..export import check_suffix, export_chat, free_name

    file, stored, looked = source
    try:
        with Store.open(file) as store:
            archive = store.archive(stored)
        if path is None:
            folder = Path() if chat.lines else working_folder()
            path = folder / free_name(archive.chat.title, folder).name
        check_suffix(path)
        if exists(path) and not chat.lines:
            return lambda: _offer_free_name(chat, path)
        export_chat(archive, path, looked)
    except (StoreError, ShellError) as error:
        return partial(chat.view.tell, error.one_line(), "error")
    text = f"Exported to {sanitise_line(str(path))}. {missing}".strip()
    return partial(chat.view.tell, text, "warning" if missing else "information")


def _offer_free_name(chat: ChatController, path: Path) -> None:
    from ..export import free_name

    free = free_name(path.stem, path.parent, path.suffix)
    chat.composer.give_back(Draft(f"/export {sanitise_line(str(free))}"))
    name = sanitise_line(path.name)
    chat.view.tell(
        f"{name} already exists and was not overwritten. Press Enter to use the name in the input box.", "warning"
    )


# Prompts that are files ---------------------------------------------------------------------------------------------------

EXAMPLE = "For example: /prompts edit review."


def prompt_folder(chat: ChatController) -> Path:
    return files.folder_in(chat.preferences.home)


def prompt_files(chat: ChatController, written: str) -> None:
    verb, _, name = written.partition(" ")
    name = name.strip().removeprefix("/").removesuffix(".md")
    match verb:
        case "":
            chat.view.open("prompt_files")
        case "edit" | "save" if name:
            (edit_prompt if verb == "edit" else save_prompt)(chat, name)
        case _:
            raise RefusedError(f"Write /prompts edit NAME or /prompts save NAME. {EXAMPLE}")


def edit_prompt(chat: ChatController, name: str) -> None:
    """Have the user's editor write the prompt file ``name``, and say what is wrong with it."""
    folder = prompt_folder(chat)
    file = files.path_of(folder, name)
    known = own_files.read(file) or ""
    text = chat.view.edited(known)
    if not text.strip() or text.strip() == known.strip():
        raise RefusedError(f"{file.name} is unchanged.")
    _told_saved(chat, files.write(folder, name, text), name)


def save_prompt(chat: ChatController, name: str) -> None:
    """Make a prompt file of the selected message, or else of the last prompt."""
    folder, node = prompt_folder(chat), chat.selected()
    if node is not None and chat.view.selected is None:
        node = chat.session.conversation.prompt_of(node.key)
    text = "" if node is None else node.prompt or (node.reply.text if node.reply is not None else "")
    if not text:
        raise RefusedError("There is no message to make a prompt of yet.")
    if exists(file := files.path_of(folder, name)):
        raise RefusedError(f"{file.name} already exists. /prompts edit {name} changes it.")
    _told_saved(chat, files.write(folder, name, text), name)


def _told_saved(chat: ChatController, file: Path, name: str) -> None:
    files.read(file.parent, name)  # or it says what is wrong
    hidden = by_slash(name) is not None
    how = f"The command /{name} is the chat's own: use ask --prompt {name}, or another name." if hidden else ""
    chat.view.tell(f"Saved {sanitise_line(str(file))}. {how or f'/{name} sends it.'}")


def listed_prompts(chat: ChatController) -> list[tuple[str, str]]:
    """Return the name of each prompt file, and a line on it."""
    folder, listed = prompt_folder(chat), []
    for name in files.names(folder):
        try:
            made = files.read(folder, name)
            told = made.about or excerpt(made.text)
        except TokamacError as error:
            told = error.one_line()
        if by_slash(name) is not None:
            told = f"{told} (hidden by the chat's own command /{name}: rename the file)"
        listed.append((name, sanitise_line(told)))
    return listed


def written_prompt(chat: ChatController, text: str) -> tuple[str, str] | None:
    """Return the prompt file that a text names, and what follows the name; None where it names none.

    The chat's own commands come first, which is told once.
    """
    word, _, _ = (text.split(maxsplit=1) or [""])[0].partition("\n")
    name = word.removeprefix("/")
    if not text.startswith("/") or name not in files.names(prompt_folder(chat)):
        return None
    if by_slash(name) is None:
        return name, text[len(word) :].strip()
    if name not in chat.told_shadowed:
        chat.told_shadowed.add(name)
        chat.view.tell(f"/{name} is the chat's own command, not your prompt {name}.md. Rename the file to use it.")
    return None


def send_prompt(chat: ChatController, name: str, arguments: str, attachments: tuple[Attachment, ...] = ()) -> None:
    """Send the prompt file ``name``: its reply has the settings of the file, this chat keeps its own. Raises TokamacError."""
    made, session = files.read(prompt_folder(chat), name), chat.session
    text, names, box = made.filled(arguments), made.profile.tools, chat.preferences.toolbox
    if not text and not attachments:
        raise RefusedError(f"The prompt {name}.md is empty. /prompts edit {name} changes it.")
    settings = replace(
        session.settings,
        sampling=files.over(made, session.sampling),
        template=files.over(made, session.template),
    )
    if names is not None and box is not None:
        names = box.check(names)
        box.start_later(names, lambda said: chat.preferences.tools_came(said))  # noqa: PLW0108  # set later
        if starting := box.pending(names):
            raise RefusedError(f"The server {sanitise_line(starting[0])} is starting. Try again in a moment.")
        settings = replace(settings, tools=box.specs(names))
    if made.profile.model is not None:
        model = lasting(setup.full_name(chat, made.profile.model))
        load = session.engine.load.for_model(model, *chat.preferences.settings.beside(model))
        if load != session.engine.load:
            if must_be_downloaded(model, hub_cache()):
                raise RefusedError(f"{name}.md needs {sanitise_line(model)}: /pull {sanitise_line(model)} gets it.")
            chat.view.tell(f"{name}.md loads {sanitise_line(model)}.")
            chat.load(load)
    chat.perform(session.submit(text, attachments, settings))


# Messages -----------------------------------------------------------------------------------------------------------------


def regenerate(chat: ChatController, text: str) -> None:
    _again(chat, text, None)


def again(chat: ChatController, text: str) -> None:
    _again(chat, text, _selected_key(chat))


def _again(chat: ChatController, text: str, key: int | None) -> None:
    session, count = chat.session, versions.wanted(text)
    if count is None:
        chat.reply(lambda: session.regenerate(key))
    else:
        chat.reply(lambda: session.write_versions(versions.samples(count, session.settings, session.engine.info), key))


def shorter(chat: ChatController, text: str) -> None:
    tokens = whole_number(text) if text else None
    if text and not tokens:
        raise RefusedError("Write a number of tokens after the command: /shorter 200")
    chat.reply(lambda: chat.session.shorten(tokens))


def undo_turn(chat: ChatController, _: str) -> None:
    """Take the last turn back; first offer to restore the files that it wrote."""
    box, turn = chat.preferences.toolbox, chat.session.last_turn()
    calls = [node.result.call for node in turn if node.result is not None]
    kept = chat.recording.writes(node.key for node in turn) if calls and chat.recording is not None else []
    if box is None or chat.session.replying or not (back := box.journal.of(calls, kept)[0]):
        _take_back(chat)
        return

    def answered(answer: int) -> None:
        if answer == 0:
            chat.view.tell(restored(box.journal.of(calls, kept)))
        _take_back(chat)

    lines: list[Line] = [("", f"{sanitise_line(str(each.path))}{NEW if each.after is None else ''}") for each in back]
    note: Line = ("note", "They are still as this turn wrote them.")
    chat.view.choose(UserChoice("Restore the files that this turn wrote?", (*lines, note), RESTORES), answered)


RESTORES = ("Restore them, and take the turn back", "Take the turn back, and keep the files")
NEW = "  (it is deleted: the turn made it)"


def restored(found: tuple[list[FileChange], list[Path]]) -> str:
    """Make these changes; return which files are as before, and which are not."""
    made, left = [], [f"{path.name} was changed since" for path in found[1]]
    for change in found[0]:
        try:
            apply(change)
            made.append(change.path.name)
        except (OSError, ToolError) as error:
            left.append(f"{change.path.name}: {error}")
    said = f"Restored: {', '.join(made)}." if made else ""
    return sanitise_line(f"{said} Not restored: {'; '.join(left)}." if left else said)


def _take_back(chat: ChatController) -> None:
    """Take the last turn back; its prompt returns, unless something else is written."""
    steps, busy = chat.session.undo_turn(), bool(chat.composer.unsent.whole)
    chat.perform([step for step in steps if not (busy and isinstance(step, DraftReturned))])
    if any(isinstance(step, DraftReturned) for step in steps):
        chat.view.tell(f"Took the last turn back. {chat.session.keymap.key('branches')} shows it.")


def compact(chat: ChatController, text: str) -> None:
    if text not in ("", "now"):
        raise RefusedError("Write /compact, which tells its price, or /compact now.")
    chat.view.wait()
    chat.perform(chat.session.compact() if text else chat.session.price_compaction())


def pin_turn(chat: ChatController, _: str) -> None:
    node = chat.selected()
    prompt = None if node is None else chat.session.conversation.prompt_of(node.key)
    if prompt is None:
        raise RefusedError("There is no turn to pin yet.")
    chat.perform(chat.session.pin(prompt.key))


def compare(chat: ChatController, text: str) -> None:
    """Write the last reply, or the selected one, with several values of one setting at once."""
    session, key = chat.session, _selected_key(chat)
    if not text:
        choices = [] if chat.recording is None else chat.recording.store.choices()
        kept = ", ".join(f"{shown_name(model)} {count} of {all} times" for model, count, all in choices)
        own = f" Of models that were compared you kept {kept}." if kept else ""
        raise RefusedError(f"Write a setting and its values: {versions.EXAMPLES}.{own}")
    setting, *names = text.split()
    if setting.lower() in ("model", "models"):
        loads = _loads_of(chat, names)
        chat.reply(lambda: session.write_versions(versions.of_models(loads, session.settings), key))
        return
    chat.reply(lambda: session.write_versions(versions.compared(text, session.settings, session.engine.info), key))


def _loads_of(chat: ChatController, names: Sequence[str]) -> list[Load]:
    """Return how each model is loaded; the one that is loaded first, and beside a single other. Raises RefusedError."""
    now, found = chat.session.engine.load, []
    if chat.server.job.on:
        raise RefusedError("Other programs use this engine. /serve stop stops that.")
    for name in names:
        model = lasting(setup.full_name(chat, name))
        if must_be_downloaded(model, hub_cache()):
            raise RefusedError(f"{sanitise_line(model)} is not on this disk: /pull {sanitise_line(model)} gets it.")
        found.append(now.for_model(model, *chat.preferences.settings.beside(model)))
    return list(dict.fromkeys([now, *found] if len(found) == 1 or now in found else found))


def continue_(chat: ChatController, _: str) -> None:
    chat.reply(lambda: chat.session.continue_reply(_selected_key(chat)))


def _selected_key(chat: ChatController) -> int | None:
    node = chat.selected()
    return None if node is None else node.key


def edit(chat: ChatController, text: str) -> None:
    """Edit the selected message; without one, the last prompt."""
    nodes, selected = chat.session.conversation.tree.nodes, chat.view.selected
    if selected is not None and nodes[selected].is_reply:
        edit_reply(chat, text)
        return
    node = chat.selected()
    if node is None:
        raise RefusedError("There is no message to edit yet.")
    if (prompt := chat.session.conversation.prompt_of(node.key)) is None:
        raise RefusedError("There is no prompt to edit here.")
    chat.view.ask(prompt.key, Draft(sanitise(prompt.prompt or ""), prompt.attachments), text)


def edit_earlier(chat: ChatController, written: str) -> None:
    """Edit the prompt of the turn whose number is written, by the text after it; without one, say all prompts."""
    asked = asked_before(chat)
    turn, _, text = written.partition(" ")
    number = whole_number(turn) or 0
    if not written:
        chat.view.open("edit_earlier")
    elif 0 < number <= len(asked):
        prompt = asked[number - 1]
        chat.view.ask(prompt.key, Draft(sanitise(prompt.prompt), prompt.attachments), text.strip())
    else:
        raise RefusedError(f"There is no prompt {sanitise_line(turn):.40}: /rewind lists them, 1 to {len(asked)}.")


def asked_before(chat: ChatController) -> list[Turn]:
    """Return the turns on screen that have a prompt. Raises RefusedError where there are none."""
    if not (asked := [turn for turn in chat.session.turns if turn.key]):
        raise RefusedError("There is no prompt to edit yet.")
    return asked


def edit_reply(chat: ChatController, text: str) -> None:
    """Edit the selected reply, or that to the selected prompt."""
    node = chat.selected()
    at = None if node is None else chat.session.conversation.reply_at(node.key)
    if at is None or at.reply is None:
        raise RefusedError("There is no reply to edit yet.")
    chat.view.ask(at.key, Draft(sanitise(at.reply.text)), sanitise(text))


def older(chat: ChatController, _: str) -> None:
    _step(chat, -1)


def newer(chat: ChatController, _: str) -> None:
    _step(chat, 1)


def _step(chat: ChatController, by: int) -> None:
    """Switch to another version of the selected message, or of the last one before it that has several."""
    node = chat.selected()
    other = None if node is None else chat.session.conversation.tree.beside(node.key, by)
    if other is None:
        raise RefusedError(one_version(chat))
    chat.go(other)


def one_version(chat: ChatController) -> str:
    """Return the sentence that there are no other versions."""
    edits, regenerates = (chat.session.keymap.key(action) for action in ("edit", "regenerate"))
    return f"There is only one version. Editing ({edits}) or regenerating ({regenerates}) adds another."


def copy_message(chat: ChatController, _: str) -> None:
    """Copy the selected message as it was written, but for control characters."""
    node = chat.selected()
    text = "" if node is None else node.prompt or (node.reply.text if node.reply is not None else "")
    if node is not None and node.result is not None:
        text = node.result.text
    if not text:
        raise RefusedError("There is no message to copy yet.")
    chat.view.tell(chat.copy(sanitise(text)))


def copy_code(chat: ChatController, _: str) -> None:
    """Copy the last code block up to the selected message; again: the one before it."""
    from ..text.markdown import code_blocks

    node = chat.selected()
    path = [] if node is None else chat.session.conversation.tree.path_to(node.key)
    blocks = [block for each in path if each.reply is not None for block in code_blocks(each.reply.text)]
    if node is None or not blocks:
        raise RefusedError("There is no code block here.")
    back = chat.code_cycle.next(node.key, len(blocks))
    which = f"Code block {len(blocks) - back + 1} of {len(blocks)}. " if len(blocks) > 1 else ""
    chat.view.tell(which + chat.copy(sanitise(blocks[-back])))


def links_of(chat: ChatController) -> "list[OpenableLink]":
    """Return the links of the selected message, or of the last reply before it that has any. Raises RefusedError."""
    from ..text.markdown import links

    node = chat.selected()
    path = [] if node is None else chat.session.conversation.tree.path_to(node.key)
    for each in reversed(path):
        text = each.prompt or (each.reply.text if each.reply is not None else "")
        if found := links(sanitise(text)):
            return found
    raise RefusedError("There is no link here.")


def stats(chat: ChatController, _: str) -> None:
    chat.view.show(listed(chat.session, known=True))


def fetch_page(chat: ChatController, address: str, attach: Callable[[Attachment], None]) -> None:
    """Ask for a web page, fetch it, and attach its text. Raises TokamacError for what is no web address."""
    from ..tools import web

    host = web.check(address).netloc
    bounds = f"At most {web.MOST_BYTES // 10**6} MB in {web.DEADLINE_S:g} s, from public addresses alone. No cookies."

    def work() -> Callable[[], None]:
        try:
            page = web.fetch(address)
        except ToolError as error:
            return partial(fetched, error)
        return lambda: fetched(attachment(page.address, page.text))

    def fetched(found: Attachment | ToolError) -> None:
        chat.reading.remove(address)
        if isinstance(found, ToolError):
            chat.view.tell(found.one_line(), "warning")
        else:
            attach(found)
        chat.view.draw()

    def answered(answer: int) -> None:
        if answer == 0:
            chat.reading.append(address)
            chat.view.draw()
            chat.view.aside(work)

    lines: tuple[Line, ...] = (
        ("!", sanitise_line(address)),
        ("", f"{sanitise_line(host)} sees your address."),
        ("note", bounds),
    )
    chat.view.choose(UserChoice("Fetch this page?", lines, ("Fetch it", "Don't fetch it")), answered)


# By the registry's ids. The others are the views': ``ChatView.open`` does them.
COMMANDS: Mapping[str, Callable[[ChatController, str], None]] = {
    "new_chat": new_chat,
    "private": private,
    "open": open_,
    "title": title,
    "pin": pin,
    "folder": folder,
    "delete_chat": delete_chat,
    "restore_chat": restore_chat,
    "fork": fork,
    "export": export,
    "import": import_,
    "regenerate": regenerate,
    "again": again,
    "compare": compare,
    "compact": compact,
    "pin_turn": pin_turn,
    "shorter": shorter,
    "undo_turn": undo_turn,
    "continue": continue_,
    "edit": edit,
    "edit_reply": edit_reply,
    "edit_earlier": edit_earlier,
    "older": older,
    "newer": newer,
    "copy_message": copy_message,
    "copy_code": copy_code,
    "stats": stats,
    "prompt_files": prompt_files,
    "show": setup.show,
    "settings": setup.settings,
    "system_prompt": setup.system_prompt,
    "adapter": setup.adapter,
    "draft": setup.draft,
    "serve": setup.serve,
    "pull": setup.pull,
    "thinking": setup.thinking,
    "pace": setup.pace,
    "remember": setup.remember,
    "project": setup.project,
    "profile": setup.profile,
    "keys": setup.keys,
    "tools": setup.tools,
}


def do(chat: ChatController, action: str, argument: str = "") -> None:
    """Do an action, and tell why where it can't be done."""
    if (command := COMMANDS.get(action)) is not None:
        chat.attempt(lambda: command(chat, argument))
    else:
        chat.attempt(lambda: chat.view.open(action, argument))
