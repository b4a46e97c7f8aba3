"""``tokamac chats``: list, search, show, export, import and repair saved chats."""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.files import expanded

from ..chat.listing import part, place_of
from ..parser import ActionParser, Parser
from ..text.sanitise import sanitise_line
from ..text.terminal import ModelText, json_line, note, table
from ..text.units import count

if TYPE_CHECKING:
    from ..store.store import Questions, Store
    from ..store.values import Archive, Hit, StoredChat


# What each action is done to.
TARGETS = {
    "list": "",
    "search": "WORDS",
    "show": "ID",
    "export": "ID",
    "import": "FILE",
    "delete": "ID",
    "restore": "ID",
    "repair": "",
}
DOES = {
    "list": "chats, last used first",
    "search": "find titles, messages and attached files with all the words, or by --meaning",
    "show": "print a chat; ID:MESSAGE prints the branch of a message",
    "export": "write a chat to a new .md, .json (with all branches), .html or .svg file",
    "import": "read a chat of .md or .json; or all of an export of ChatGPT, Claude, Open WebUI (.zip, .json), of LM "
    "Studio's conversations folder or Ollama's db.sqlite: again, it adds what is new",
    "delete": "delete a chat; it can be restored for 30 days",
    "restore": "bring back a deleted chat",
    "repair": "rebuild the search index and check the file",
}
NEEDED = {"ID": "an ID; `tokamac chats` lists them", "FILE": "a FILE", "WORDS": "WORDS"}
Done = tuple[dict[str, Any], str]  # what came of an action, as the JSON has it and as a person reads it


def parser() -> ActionParser:
    made = ActionParser(
        "chats",
        "Manage saved chats. IDs can be abbreviated. TOKAMAC_DATA_DIR moves them.",
        "  tokamac chats\n"
        "  tokamac chats search memory bandwidth\n"
        "  tokamac chats search --meaning why decoding is slow\n"
        "  tokamac chats show k3v7\n"
        "  tokamac chats export k3v7 -o bandwidth.html\n"
        "  tokamac chats import bandwidth.md",
        DOES,
    )
    made.add_argument("target", nargs="*", metavar="ID|FILE|WORDS", help="chat ID; import: a file; search: words")
    made.add_argument(
        "-o", "--output", metavar="FILE", help="export: output file (default: named after the title, .md)"
    )
    made.add_argument("--dry-run", action="store_true", help="import: count, and change nothing")
    made.add_argument("--deleted", action="store_true", help="list: deleted chats")
    made.add_argument("--set-aside", action="store_true", help="repair: set a file beyond repair aside, unchanged")
    made.add_argument("--meaning", action="store_true", help="search: by meaning, with an embedding model that is here")
    made.add_argument("--json", action="store_true", help="one JSON object")
    made.only([action for action, target in TARGETS.items() if target], "target")
    made.only(("export",), "output")
    made.only(("import",), "dry_run")
    made.only(("search",), "meaning")
    made.only(("list",), "deleted")
    made.only(("repair",), "set_aside")
    return made


def run(parser: Parser, options: argparse.Namespace) -> int:
    action, given, wanted = options.action, options.target, TARGETS[options.action]
    if wanted and not "".join(given).strip():
        parser.error(f"{action} needs {NEEDED[wanted]}")
    if given and not wanted:
        parser.error(f"{action} takes neither ID, FILE nor WORDS")
    if len(given) > 1 and wanted != "WORDS":
        parser.error(f"unrecognized arguments: {' '.join(given[1:])}")
    if options.output and action != "export":
        parser.error(f"--output has no effect with {action}")
    if options.dry_run and action != "import":
        parser.error(f"--dry-run has no effect with {action}")
    if options.meaning and action != "search":
        parser.error(f"--meaning has no effect with {action}")
    if options.deleted and action != "list":
        parser.error(f"--deleted has no effect with {action}")
    if options.set_aside and action != "repair":
        parser.error(f"--set-aside has no effect with {action}")
    plain, text = _repair(set_aside=options.set_aside) if action == "repair" else _on_store(options, " ".join(given))
    if options.json:
        json_line(plain)
    else:
        out = ModelText(sys.stdout)
        out.write(text)
        out.end()
    return 0


def _on_store(options: argparse.Namespace, target: str) -> Done:
    from ..store.store import Store

    if options.action in READ:
        with closing(open_to_read()) as questions:
            return READ[options.action](questions, target, options)
    with Store.open() as store:
        done = WRITE[options.action](store, target, options)
        _purge(store)
        return done


def open_to_read() -> "Questions":
    """Open the chats, also read-only. Raises StoreError."""
    from ..store.database import default_path
    from ..store.store import Questions, Store
    from ..store.values import StoreDamagedError, StoreError

    try:
        return Store.open()
    except StoreDamagedError:
        raise
    except StoreError as error:
        try:
            found = Questions.open_to_read(default_path())
        except StoreError:
            raise error from None
        note(f"note: {error.message}; reading without writing")
        return found


def _purge(store: "Store") -> None:
    from ..store.values import StoreError

    try:
        store.purge()
    except StoreError as error:
        note(f"Chats that were deleted long ago could not be removed: {error.one_line()}")


def _repair(*, set_aside: bool) -> Done:
    """Repair the file without opening it normally. set_aside: move an irreparable one away."""
    from ..store.database import default_path
    from ..store.store import Store
    from ..store.values import StoreDamagedError

    path = default_path()
    try:
        messages = Store.repair(path)
    except StoreDamagedError as error:
        if not set_aside:
            raise
        kept = Store.set_aside(path)
        said = f"{error.message}\nset aside, unchanged, as {kept}; the next chat begins a new file"
        return {"path": str(path), "set_aside": str(kept)}, "\n".join(map(sanitise_line, said.split("\n")))
    said = f"{sanitise_line(str(path))} is intact; its search index is rebuilt: {count(messages)} messages"
    return {"path": str(path), "messages": messages}, said


def _list(store: "Questions", _: str, options: argparse.Namespace) -> Done:
    found = store.chats(limit=sys.maxsize, deleted=options.deleted)
    return {"chats": [_plain(chat) for chat in found]}, _listed(found, deleted=options.deleted)


def _by_meaning(store: "Questions", words: str) -> "list[Hit]":
    from .. import settings
    from ..chat.listing import MeaningSearch

    path = settings.default_path()
    search = MeaningSearch.here(store.file, settings.load(path).settings, path.parent)
    try:
        if (price := search.price()).unread:
            note(f"{price} Ctrl-C stops it; what was read is kept.")
        return search.find(words, lambda _, __: None)
    finally:
        search.close()


def _search(store: "Questions", words: str, options: argparse.Namespace) -> Done:
    chats = [] if options.meaning else store.chats(words, limit=sys.maxsize)
    hits = _by_meaning(store, words) if options.meaning else store.search(words, limit=sys.maxsize)
    told = ("chat", "message", "title", "role", "file", "marks", "likeness")
    messages = [{**{name: getattr(hit, name) for name in told}, "text": hit.snippet} for hit in hits]
    rows = [["id", "when", "where", "text"]]
    rows += [[chat.id, _day(chat.updated_at), "title", sanitise_line(chat.title)] for chat in chats]
    rows += [[place_of(hit), _day(hit.created_at), sanitise_line(hit.file) or hit.role, part(hit)] for hit in hits]
    places = f"{count(len(rows) - 1)} place{'' if len(rows) == 2 else 's'}"
    text = f"{table(rows)}\n\n{places}; tokamac chats show ID prints a chat" if len(rows) > 1 else "nothing was found"
    return {"chats": [_plain(chat) for chat in chats], "messages": messages}, text


def _show(store: "Questions", target: str, _: argparse.Namespace) -> Done:
    from ..store.export import loads, to_json
    from ..store.values import StoreError

    name, sign, message = target.partition(":")
    archive = store.archive(_chat(store, name).id)
    if sign:
        if message not in {str(each.id) for each in archive.messages}:
            raise StoreError(f"Chat {archive.chat.id} has no message {message!r:.20}", "Take ID:MESSAGE from a search.")
        archive = replace(archive, chat=replace(archive.chat, head=store.tip(int(message))))
    return {"id": archive.chat.id, **loads(to_json(archive))}, _read(archive)


def _export(store: "Questions", target: str, options: argparse.Namespace) -> Done:
    from ..export import export_chat, free_name

    chat = _chat(store, target)
    path = expanded(options.output) if options.output else free_name(chat.title, Path.cwd())
    export_chat(store.archive(chat.id), path)
    return {**_plain(chat), "path": str(path)}, f"exported {chat.id} to {sanitise_line(str(path))}"


def _import(store: "Store", target: str, options: argparse.Namespace) -> Done:
    from ..export import bring_all

    chats, said = bring_all(store, expanded(target), now=time.time(), dry_run=options.dry_run)
    plain = [_plain(chat) for chat in chats]
    return {**(plain[0] if len(plain) == 1 else {}), "chats": plain, "summary": said}, said


def _delete(store: "Store", target: str, _: argparse.Namespace) -> Done:
    chat = store.delete(_chat(store, target).id)
    return _plain(chat), f"deleted {chat.id}: {_title(chat)}; bring it back with: tokamac chats restore {chat.id}"


def _restore(store: "Store", target: str, _: argparse.Namespace) -> Done:
    chat = store.undelete(_chat(store, target, "tokamac chats list --deleted").id)
    return _plain(chat), f"restored {chat.id}: {_title(chat)}"


def _chat(store: "Questions", target: str, lists: str = "tokamac chats") -> "StoredChat":
    """Resolve an ID or prefix. lists: the command that shows IDs. Raises StoreError."""
    from ..store.values import NoChatError

    try:
        return store.chat(target)
    except NoChatError as error:
        raise NoChatError(error.message, f"`{lists}` lists them.") from None


READ: "dict[str, Callable[[Questions, str, argparse.Namespace], Done]]" = {
    "list": _list,
    "search": _search,
    "show": _show,
    "export": _export,
}
# Actions that change what is kept: what was deleted long ago goes with them. Not repair: what is broken is not thinned
# out.
WRITE: "dict[str, Callable[[Store, str, argparse.Namespace], Done]]" = {
    "import": _import,
    "delete": _delete,
    "restore": _restore,
}


def _plain(chat: "StoredChat") -> dict[str, Any]:
    from ..store.export import chat_record

    record = chat_record(chat)
    shown = {key: record[key] for key in ("title", "created", "updated", "model")}
    return {"id": chat.id, **shown, "pinned": chat.pinned_at is not None, "folder": chat.folder}


def _listed(chats: "list[StoredChat]", *, deleted: bool) -> str:
    if not chats:
        return "no deleted chats" if deleted else "no chats yet; begin one with: tokamac"
    rows = [["id", "last used", "model", "title"]]
    for chat in chats:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(chat.updated_at))
        notes = [
            *(["pinned"] if chat.pinned_at is not None else []),
            *([sanitise_line(chat.folder)] if chat.folder else []),
        ]
        title = _title(chat) + (f" ({', '.join(notes)})" if notes else "")
        rows.append([chat.id, used, sanitise_line(chat.model).rpartition("/")[2], title])
    return f"{table(rows)}\n\n{count(len(chats))} chat{'' if len(chats) == 1 else 's'}"


def _title(chat: "StoredChat") -> str:
    return sanitise_line(chat.title) or "untitled"


def _read(archive: "Archive") -> str:
    from ..export import entries, title_of

    said = [f"# {title_of(archive)}"]
    for entry in entries(archive):
        files = (f"[{each.name}]" for each in entry.files)
        parts = (f"## {entry.who}", entry.text, *files, f"({entry.ending})" if entry.ending else "")
        said += (part for part in parts if part)
    return "\n\n".join(said)


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))
