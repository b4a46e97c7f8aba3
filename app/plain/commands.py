"""The registry's slash commands, done without a screen, as lines to be read out.

What only a screen can show says so, and names what does the same elsewhere. The versions of a conversation are a numbered outline:
each message that stands beside others, and inside it those that follow. Copying uses the system's own tool, else a file: the
terminal itself is asked for nothing.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.chat import actions, listing
from tokamac.app.chat.actions import ACTIONS, Action, unknown
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.conversation import MessageNode, Reply, Tree, Turn
from tokamac.app.chat.external_programs import (
    FILE,
    EditorError,
    NotTakenError,
    copy_by_tool,
    edit_text,
    editor_command,
    filed,
    size_of,
)
from tokamac.app.chat.figures import FIGURES, Explained, Figure, explain
from tokamac.app.chat.listing import EXCERPT, ago, excerpt, part, said_in
from tokamac.app.chat.models import lasting
from tokamac.app.chat.preferences import (
    KV_FIELDS,
    MEMORY_FIELDS,
    SAMPLING_FIELDS,
    TEMPLATE_FIELDS,
    ChatOverrides,
    Field,
    FieldError,
    chosen,
    read_kv,
    read_memory,
    read_sampling,
    read_template,
    sentences,
    whole_number,
    write,
)
from tokamac.app.chat.recording import LEFT, Recording
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.options import given_adapter
from tokamac.app.plain import processes
from tokamac.app.plain.console import unbroken
from tokamac.app.sanitise import sanitise
from tokamac.app.settings import Settings, gigabytes_of, with_adapter
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoredChat, StoreError
from tokamac.app.tui.markdown.parse import code_blocks
from tokamac.app.tui.markdown.turns import ended
from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

if TYPE_CHECKING:
    from tokamac.app.plain.repl import Repl


NOT_KEPT = StoreError("Chats are not kept", "The reason was said at the start.")
NOTHING_YET = StoreError("Nothing was said yet", "Ask something first.")
MOST_LISTED = 20


def new(repl: "Repl", _: str) -> None:
    """Begin another conversation; this one is kept."""
    if _begin(repl):
        repl.console.note(LEFT)
    repl.console.note("New chat. The model stays loaded.")


@unbroken()
def _begin(repl: "Repl") -> bool:
    """Leave the conversation for a new one; return whether what was not sent stays with it."""
    driver, unsent, unkept = repl.driver, repl.composer.unsent, repl.keep_draft()
    driver.memory.hold(ChatOverrides(), driver.session)
    driver.perform(driver.session.new_chat())
    repl.composer.hold(unkept)
    return bool(unsent.whole) and not unkept.whole


def listed(repl: "Repl", words: str) -> None:
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


def opened(repl: "Repl", name: str) -> None:
    """Open a chat by its number in the last list, or by its id."""
    store = _recording(repl).store
    if not name:
        repl.console.note("Write the number of a chat, or its id, after the command: /open 1. /chats lists them.")
        return
    repl.open(_named(repl, store, name).id)


def _named(repl: "Repl", store: Store, name: str) -> StoredChat:
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


def delete(repl: "Repl", name: str) -> None:
    """Delete this chat, which then begins anew, or another one."""
    recording = _recording(repl)
    store, held = recording.store, recording.chat
    if not name and held is None:
        repl.console.note("There is nothing to delete yet.")
        return
    chat = _named(repl, store, name) if name else store.chat(held or "")
    said = listing.delete(recording, chat, lambda: _begin(repl), title=_titled(chat), back="/restore")
    repl.console.note(said.text)


def restore(repl: "Repl", name: str) -> None:
    """Bring back the chat that was deleted last, or another one, and open it."""
    store = _recording(repl).store
    chat = _named(repl, store, name) if name else store.last_deleted()
    repl.console.note(listing.restore(store, chat, repl.open, title=_titled).text)


def _titled(chat: StoredChat) -> str:
    return f"{excerpt(chat.title or chat.draft) or 'untitled'} ({chat.id})"


def title(repl: "Repl", text: str) -> None:
    """Give the conversation a title."""
    recording = _recording(repl)
    if recording.chat is None:
        raise NOTHING_YET
    if not text:
        repl.console.note("Write the title after the command: /title Keys and values")
        return
    if recording.retitle(text):
        repl.console.note("The chat has another title.")


def fork(repl: "Repl", _: str) -> None:
    """Go on in a copy; this chat stays as it is."""
    recording, head = _recording(repl), repl.driver.session.conversation.tree.head
    stored = None if head is None else recording.stored(head)
    if recording.chat is None or stored is None:
        raise NOTHING_YET
    repl.open(recording.store.fork(recording.chat, stored).id)
    repl.console.note("This is a copy: the chat it comes from stays as it is.")


def export(repl: "Repl", written: str) -> None:
    """Write the conversation to a new file."""
    from tokamac.app.export import formats

    recording = _recording(repl)
    lacking = recording.lacking()
    if recording.chat is None:
        raise NOTHING_YET
    archive = recording.store.archive(recording.chat)
    path = Path(written).expanduser() if written else formats.free_name(archive.chat.title, Path())
    formats.export_chat(archive, path)
    repl.console.note(f"Exported to {path}. {lacking}".strip())


def imported(repl: "Repl", written: str) -> None:
    """Make a new chat of a file, and open it."""
    from tokamac.app.export.formats import bring

    store = _recording(repl).store
    if not written:
        repl.console.note("Write the file after the command: /import chat.md (or .json)")
        return
    repl.open(store.adopt(bring(Path(written).expanduser(), now=time.time())).id)


def _recording(repl: "Repl") -> Recording:
    """Return what keeps the chats. Raises StoreError where nothing does."""
    if repl.driver.recording is None:
        raise NOT_KEPT
    return repl.driver.recording


def copied(text: str, folder: Path) -> str:
    """Copy ``text``, or put it into a file in ``folder`` that the user alone can read; return a sentence that says which."""
    try:
        return f"Copied {size_of(text)} ({copy_by_tool(text)})."
    except NotTakenError as error:
        why, file = str(error), folder / FILE
    try:
        filed(file, text)
    except OSError as error:
        return f"Not copied ({why}), and {file} can't be written: {error.strerror}."
    return f"Not copied ({why}): the text, {size_of(text)}, is in {file}."


@dataclass(frozen=True, slots=True)
class Outline:
    """The versions of ``tree`` as they were listed: ``keys`` of the messages by their numbers, and a line for each."""

    tree: Tree
    keys: tuple[int, ...]
    lines: tuple[str, ...]


def outline(tree: Tree) -> Outline:
    """Return the outline as it is now."""
    read = {node.key for node in tree.path_to(tree.head)}
    keys, lines = [], []
    for key, depth in _versions(tree):
        keys.append(key)
        lines.append(f"{'  ' * depth}{len(keys)}. {_outline_line(tree, key, read=key in read)}")
    return Outline(tree, tuple(keys), tuple(lines))


def _versions(tree: Tree) -> Iterator[tuple[int, int]]:
    """Yield every message that has another beside it, and in how many of such it is."""
    todo: list[tuple[int | None, int]] = [(None, 0)]
    while todo:  # a loop: a path may be longer than Python's stack
        at, depth = todo.pop()
        if at is not None and len(tree.siblings(at)) > 1:
            yield at, depth
            depth += 1
        todo += [(key, depth) for key in reversed(tree.children(at))]


def _outline_line(tree: Tree, key: int, *, read: bool) -> str:
    number, many = tree.place(key)
    turn = sum(each.prompt is not None for each in tree.path_to(key))
    who, said = said_in(tree.nodes[key], EXCERPT)
    return f"turn {turn}, {who}, version {number} of {many}{', read now' if read else ''}: {said}"


NOTHING = "Nothing was said yet."


def last_turn(turns: Sequence[Turn]) -> str:
    """Return the last prompt and its reply, and how many turns there are."""
    if not turns:
        return NOTHING
    turn = turns[-1]
    lines = [f"Turn {len(turns)} of {len(turns)}."] if len(turns) > 1 else []
    lines += [f"system: {text}" for text in turn.system]
    lines += [f"you{_version(turn.place)}: {turn.prompt}"] if turn.key or turn.prompt else []  # else there is no prompt
    lines += [f"attached: {each.name}" for each in turn.attachments]
    lines += [f"system: {text}" for text in turn.between]
    return "\n".join([*lines, *([_reply(turn.reply, turn.reply_place)] if turn.reply is not None else [])])


def _reply(reply: Reply, place: tuple[int, int]) -> str:
    ending = ended(reply.ending, reply.reason)
    return f"{reply.model or 'reply'}{_version(place)}: {reply.text}" + (f"\n({ending})" if ending else "")


def _version(place: tuple[int, int]) -> str:
    return f" (version {place[0]} of {place[1]})" if place[1] > 1 else ""


ONE_VERSION = "There is one version only: /edit or /again make another."


def again(repl: "Repl", _: str) -> None:
    """Make the last reply again."""
    repl.driver.settle(loaded=True)
    repl.driver.perform(repl.driver.session.regenerate())


def continue_(repl: "Repl", _: str) -> None:
    """Go on with the last reply."""
    repl.driver.settle(loaded=True)
    repl.driver.perform(repl.driver.session.continue_reply())


def edit(repl: "Repl", text: str) -> None:
    """Ask the last prompt anew: as ``text``, or as it is changed on the next line."""
    node = _last(repl)
    if node is None:
        repl.console.note("There is no message to edit yet.")
        return
    prompt = repl.driver.session.conversation.prompt_of(node.key)
    if prompt is None:
        repl.console.note("There is no prompt to edit here.")
        return
    if not text and not repl.console.typed:
        repl.console.note("Write the new prompt after the command: /edit TEXT")
        return
    repl.composer.begin_edit(prompt.key, Draft(sanitise(prompt.prompt or ""), prompt.attachments))
    if text:
        repl.ask(text)
    else:
        said = "The next line is asked in place of the last prompt, which stays beside it. Ctrl-C gives it up."
        repl.console.note(said)


def older(repl: "Repl", _: str) -> None:
    """Read the version before this one."""
    _step(repl, -1)


def newer(repl: "Repl", _: str) -> None:
    """Read the version after this one."""
    _step(repl, 1)


def _step(repl: "Repl", by: int) -> None:
    """Go to a version of the last message that has several, and read it out."""
    node = _last(repl)
    other = None if node is None else repl.driver.session.conversation.tree.beside(node.key, by)
    if other is None:
        repl.console.note(ONE_VERSION)
    else:
        _go(repl, other)


def branches(repl: "Repl", number: str) -> None:
    """List the versions of this chat, or go to the one of this number in the last list, and read it out."""
    tree = repl.driver.session.conversation.tree
    if not number or repl.outline is None or repl.outline.tree is not tree:
        repl.outline = outline(tree)
    keys, lines = repl.outline.keys, repl.outline.lines
    wanted = whole_number(number) or 0
    if not keys:
        repl.console.note(ONE_VERSION)
    elif not number:
        repl.console.say("\n".join(lines))
        repl.console.aside("/branches and a number goes there.")
    elif 0 < wanted <= len(keys):
        _go(repl, keys[wanted - 1])
    else:
        repl.console.note(f"There is no version {number:.40}: /branches lists them, 1 to {len(keys)}.")


def _go(repl: "Repl", key: int) -> None:
    session = repl.driver.session
    repl.driver.perform(session.show_path(key))
    repl.console.say(last_turn(session.turns))


def end(repl: "Repl", _: str) -> None:
    """Read the last turn out again."""
    repl.console.say(last_turn(repl.driver.session.turns))


def copy(repl: "Repl", _: str) -> None:
    """Copy the last message."""
    node = _last(repl)
    text = "" if node is None else node.prompt or (node.reply.text if node.reply is not None else "")
    _copy(repl, text, "There is no message to copy yet.")


def code(repl: "Repl", _: str) -> None:
    """Copy the last code block; asked again, the one before it."""
    replies = [turn.reply.text for turn in repl.driver.session.turns if turn.reply is not None]
    blocks = [block for text in replies for block in code_blocks(text)]
    back = repl.code_back.again(repl.driver.session.conversation.tree.head or 0, len(blocks)) if blocks else 0
    which = f"Code block {len(blocks) - back + 1} of {len(blocks)}. " if len(blocks) > 1 else ""
    _copy(repl, blocks[-back] if blocks else "", "There is no code block here.", which)


def _copy(repl: "Repl", text: str, nothing: str, which: str = "") -> None:
    said = copied(sanitise(text), repl.driver.memory.home) if text else nothing
    repl.console.note(which + said if text else said)


def _last(repl: "Repl") -> MessageNode | None:
    tree = repl.driver.session.conversation.tree
    return None if tree.head is None else tree.nodes[tree.head]


NONE = "none"
"""Takes the system prompt away."""
NAMES = tuple(field.name for field in (*SAMPLING_FIELDS, *TEMPLATE_FIELDS, *KV_FIELDS, *MEMORY_FIELDS))
"""Of what /settings changes."""


def model(repl: "Repl", name: str) -> None:
    """Load another model, or say which one is loaded. One that loads is the one to begin with from now on."""
    driver = repl.driver
    session = driver.session
    if not name:
        repl.console.say(session.engine.load.model)
        return
    name = lasting(name)
    if not repl.console.typed:  # a script's line: the model before is loaded first, so that there is one to go back to
        driver.settle(loaded=True)
    driver.perform(session.choose(session.engine.load.of(name, driver.memory.settings.adapters.get(name))))
    driver.settle(loaded=True)
    if session.engine.info is not None and session.engine.load.model == name:
        _tell(
            repl,
            driver.memory.keep(replace(driver.memory.settings, model=name)) or f"{session.engine.info.name} is loaded.",
        )


def adapter(repl: "Repl", written: str) -> None:
    """Load the model with another adapter, or with none, and keep that for this model; or say which it has."""
    driver = repl.driver
    load, known = driver.session.engine.load, driver.memory.settings
    if not written:
        repl.console.say(load.adapter or "This model has no adapter.")
        return
    chosen = given_adapter(written) or None
    _tell(repl, "The model loads again with it." if chosen else "The model loads again without one.")
    driver.perform(driver.session.choose(replace(load, adapter=chosen)))
    driver.settle(loaded=True)
    if driver.session.engine.info is not None and driver.session.engine.load.adapter == chosen:
        _keep(repl, replace(known, adapters=with_adapter(known, load.model, chosen)))


def system(repl: "Repl", text: str) -> None:
    """Give this chat a system prompt, or read it out."""
    driver = repl.driver
    if not text:
        repl.console.say(driver.session.system or "No system prompt.")
        return
    driver.memory.choose_system("" if text.lower() == NONE else text, own=True)
    driver.memory.give(driver.session)
    if driver.recording is not None:
        driver.recording.keep_own()
    _tell(repl, "The system prompt holds in this chat from the next message on; /system none takes it away.")


def settings(repl: "Repl", written: str) -> None:
    """Read out how tokens are chosen and how keys and values are kept, or change one of these."""
    session = repl.driver.session
    sampling, kv = _texts(SAMPLING_FIELDS, session.sampling), _texts(KV_FIELDS, session.engine.load.kv)
    template = _texts(TEMPLATE_FIELDS, repl.driver.memory.settings.template)
    held = Settings(unload_after_min=session.idle.after_min, memory_gb=gigabytes_of(session.engine.load.memory))
    memory = _texts(MEMORY_FIELDS, held)
    name, _, value = written.partition(" ")
    if not name:
        notes = {field.name: field.note for field in (*SAMPLING_FIELDS, *TEMPLATE_FIELDS, *KV_FIELDS, *MEMORY_FIELDS)}
        values = {**sampling, **template, **kv, **memory}
        repl.console.say("\n".join(f"{each}: {text or 'not set'} ({notes[each]})" for each, text in values.items()))
        return
    try:
        if name in sampling:
            _choose_sampling(repl, read_sampling({**sampling, name: value}))
        elif name in template:
            _choose_template(repl, read_template({**template, name: value}))
        elif name in kv:
            _choose_kv(repl, name, read_kv({**kv, name: value}))
        elif name in memory:
            _choose_memory(repl, name, replace(held, **read_memory({**memory, name: value})))
        else:
            _tell(repl, f"There is no setting {name}. /settings lists them.")
    except FieldError as error:
        _tell(repl, str(error))
    except OptionError as error:
        _tell(repl, error.one_line())


def _choose_sampling(repl: "Repl", sampling: Sampling) -> None:
    memory = repl.driver.memory
    said = memory.choose_sampling(sampling, own=False)
    memory.give(repl.driver.session)
    own = "It holds in every chat but those with settings of their own."
    _tell(repl, said or own)


def thinking(repl: "Repl", text: str) -> None:
    """Read out what the chat template is told in this chat, or tell it something else from the next message on."""
    driver = repl.driver
    if driver.session.engine.info is None and not repl.console.typed:
        driver.settle(loaded=True)  # a script's line: the model says what it can be told
    session = driver.session
    if not text:
        repl.console.say(sentences(session.template, session.engine.info))
        return
    template = chosen(text, session.template, session.engine.info)
    driver.memory.choose_template(template, own=True)
    driver.memory.give(session)
    if driver.recording is not None:
        driver.recording.keep_own()
    _tell(repl, f"{sentences(template, None)} It holds in this chat from the next message on.")


def _choose_template(repl: "Repl", template: TemplateOptions) -> None:
    memory = repl.driver.memory
    _keep(repl, replace(memory.settings, template=template))
    memory.give(repl.driver.session)
    _tell(repl, "It holds in every chat but those with their own; /thinking is for this chat alone.")


def _choose_memory(repl: "Repl", name: str, chosen: Settings) -> None:
    """Change what the model may take, which loads it again, or when it is unloaded. name: the field that was named."""
    driver = repl.driver
    session, load = driver.session, replace(driver.session.engine.load, memory=chosen.memory_bytes)
    same = load == session.engine.load and chosen.unload_after_min == session.idle.after_min
    said = _texts(MEMORY_FIELDS, chosen)[name] or "not set"
    _tell(repl, f"It is {said} already." if same else f"{name} is {said} now.")
    session.idle.after_min = chosen.unload_after_min
    kept = driver.memory.settings
    if name == "memory_gb":
        kept = replace(kept, memory_gb=chosen.memory_gb)
    else:
        kept = replace(kept, unload_after_min=chosen.unload_after_min)
    _keep(repl, kept)
    if load != session.engine.load:
        _tell(repl, "The model loads again with it.")
        driver.perform(session.choose(load))
        driver.settle(loaded=True)


def _choose_kv(repl: "Repl", name: str, kv: KVSpec) -> None:
    """Change how keys and values are kept, which loads the model again; one that loads so is remembered.

    name: the field that was named.
    """
    driver = repl.driver
    load = driver.session.engine.load
    if kv == load.kv:
        _tell(repl, f"It is {_texts(KV_FIELDS, kv)[name] or 'not set'} already.")
        return
    _tell(repl, "The model loads again with it.")
    driver.perform(driver.session.choose(replace(load, kv=kv)))
    driver.settle(loaded=True)
    if driver.session.engine.info is not None and driver.session.engine.load.kv == kv:
        _keep(repl, replace(driver.memory.settings, kv=kv))


def _texts(fields: tuple[Field, ...], options: object) -> dict[str, str]:
    return {field.name: write(field, options) for field in fields}


def _keep(repl: "Repl", settings: Settings) -> None:
    if problem := repl.driver.memory.keep(settings):
        _tell(repl, problem)


def _tell(repl: "Repl", text: str) -> None:
    repl.console.note(text)


TOLD = tuple(figure for figure in FIGURES if figure != "now")
"""A line is read when no reply is written: nothing has a rate of this moment then."""
BESIDE: Mapping[Figure, tuple[str, ...]] = {
    "cached": ("prompt",),
    "gaps": ("p95", "p99"),
    "ceiling": ("ceiling",),
    "expected": ("expected rate",),
    "context": ("context length",),
    "peak": ("budget",),
}
"""Figures that are read beside some of their inputs."""


def gauges(repl: "Repl", name: str) -> None:
    """Say the figures of the last reply, or explain the one that is named."""
    known = {figure: explain(figure, repl.driver.session) for figure in TOLD}
    if not name:
        repl.console.say("\n".join(_line(figure, each) for figure, each in known.items()))
        repl.console.aside("/gauges and a name explains a figure: its formula, its inputs, its source.")
        return
    wanted = name.casefold()
    named = [each for figure, each in known.items() if wanted in (figure, each.name.casefold())]
    if named:
        repl.console.say("\n".join(_lines(named[0])))
    else:
        repl.console.note(f"There is no figure {name}. /gauges lists them.")


def why(repl: "Repl", _: str) -> None:
    """Say why the last reply that was measured took as long as it did."""
    from tokamac.app import verdict

    replies = [turn.reply for turn in repl.driver.session.turns if turn.reply is not None]
    last = next((reply for reply in reversed(replies) if reply.metrics is not None), None)
    if last is None or last.metrics is None:
        repl.console.note("There is no reply to explain yet.")
        return
    lines = [verdict.sentence(last.metrics, last.diagnosis)]
    if last.diagnosis is not None:
        lines += verdict.lines(last.diagnosis)
    repl.console.say("\n".join(lines))


def _line(figure: Figure, known: Explained) -> str:
    beside = [f"{each.name} {each.value}" for each in known.inputs if each.name in BESIDE.get(figure, ())]
    told = ", ".join([*([known.why] if known.why else []), *beside])
    return f"{known.name}: {known.value}" + (f" ({told})" if told else "")


def _lines(known: Explained) -> list[str]:
    return [
        f"{known.name}: {known.value}" + (f" ({known.why})" if known.why else ""),
        known.meaning,
        f"How: {known.name} = {known.formula}",
        *(f"From: {each.name}: {each.value} ({each.source})" for each in known.inputs),
        f"Source: {known.source}",
    ]


def editor(repl: "Repl", _: str) -> None:
    """Write a prompt in the user's own editor, and send it."""
    try:
        command = editor_command()
        with repl.away():
            text = edit_text(command, repl.composer.draft.text)
    except EditorError as error:
        repl.console.note(str(error))
        return
    if text.strip():
        repl.console.say(text)
        repl.ask(text.strip())


def attach(repl: "Repl", path: str) -> None:
    """Let a file go with the next prompt."""
    from tokamac.app.chat.attachments import read_file

    if not path:
        repl.console.note("Write the file after the command: /attach notes.md")
        return
    made, draft = read_file(path, Path()), repl.composer.draft
    others = tuple(each for each in draft.attachments if each.name != made.name)
    repl.composer.draft = Draft(draft.text, (*others, made))
    repl.console.note(f"{made.name}, {len(made.text):,} characters, goes with the next prompt.")


def detach(repl: "Repl", name: str) -> None:
    """Let go of a file, or of the last one."""
    draft = repl.composer.draft
    named = [each for each in draft.attachments if name in ("", each.name)]
    if not named:
        repl.console.note(f"Nothing called {name} is attached." if name else "Nothing is attached.")
        return
    repl.composer.draft = Draft(draft.text, tuple(each for each in draft.attachments if each is not named[-1]))
    repl.console.note(f"{named[-1].name} does not go with the next prompt.")


Command = Callable[["Repl", str], None]

NEEDS_SCREEN = "/{} needs the full screen: leave, and open it with tokamac chat."
INSTEAD = {"toggle_panel": "/gauges says the figures"}
ARGUMENTS = {
    "chats": "[WORDS]",
    "open": "NUMBER|ID",
    "delete_chat": "[NUMBER|ID]",
    "branches": "[NUMBER]",
    "attach": "PATH",
    "ask_guide": "QUESTION",
    "edit": "[TEXT]",
    "system_prompt": "[TEXT]",
    "settings": "[NAME VALUE]",
    "gauges": "[FIGURE]",
    "what_if": "[MODEL] [FLAGS]",
    "convert": "[MODEL] [FLAGS]",
}
"""What may, or must, follow a command here, where the registry's has a dialog for it."""
LINED = frozenset({"edit", "system_prompt"})
"""What follows these may have several lines; else such a text is a prompt."""
HELP = {
    "open": "Open a chat by its number in the last list, or by its id.",
    "delete_chat": "Delete this chat, or the one of that number or id; it can be brought back for 30 days.",
    "branches": "List the versions of this chat, or go to one.",
    "pull": "Download a model by its Hugging Face id, and wait for it.",
    "gauges": "Say the last reply's figures, or explain one.",
    "what_if": "Other precisions, KV settings, contexts and chips: memory, fit and speed; flags as of tokamac inspect.",
    "convert": "Plan packing a model into fewer bits, with flags as of tokamac convert; alone after that: do it.",
    "attach": "Let a file go with the next prompt.",
    "detach": "Let go of an attachment, or of the last one.",
    "scroll_end": "Read the last turn out again.",
    "help": "These commands.",
}
"""What a command does here, where the registry's help speaks of keys and dialogs."""


def obey(repl: "Repl", text: str) -> bool:
    """Do the slash command that ``text`` is; return whether it is one."""
    if (written := actions.parse(text, LINED)) is None:
        return False
    word, argument, action = written.word, written.argument, written.action
    if action is None:
        repl.console.note(f"{unknown(word)} /help lists them; a space before it sends it as it is.")
    elif argument and not takes(action):
        repl.console.note(f"{word} stands alone; a space before it sends all of this as it is.")
    elif (command := COMMANDS.get(action.id)) is None:
        instead = INSTEAD.get(action.id)
        repl.console.note(NEEDS_SCREEN.format(action.slash) + (f" Here: {instead}." if instead else ""))
    else:
        try:
            command(repl, argument)
        except TokamacError as error:
            repl.console.note(error.one_line())
    return True


def takes(action: Action) -> str:
    """Return what may follow the command, as the help names it."""
    return ARGUMENTS.get(action.id, action.argument)


def completed(before: str, begun: str) -> list[str]:
    """Return what the word that is ``begun`` can become, after what stands ``before`` it: a command, or a setting's name."""
    if not before:
        return [name for name in _names() if begun.startswith("/") and name.startswith(begun.lower())]
    names = NAMES if before.split() == ["/settings"] else ()
    return [f"{name} " for name in names if name.startswith(begun)]


def _names() -> Iterator[str]:
    """Yield every command that can be done here, with its slash, and a space where something may follow it."""
    for action in ACTIONS:
        if action.slash and action.id in COMMANDS:
            yield f"/{action.slash}" + (" " if takes(action) else "")


def _help(repl: "Repl", _: str) -> None:
    listed = [action for action in ACTIONS if action.slash and action.id in COMMANDS]
    lines = [f"/{action.slash} {takes(action)}".rstrip() + f": {HELP.get(action.id, action.help)}" for action in listed]
    lines += ["A line that ends with a backslash goes on in the next one.", 'Lines between two """ are one prompt.']
    repl.console.say("\n".join(lines))


def _leave(repl: "Repl", _: str) -> None:
    repl.leaving = True


def _stop(repl: "Repl", _: str) -> None:
    repl.console.note("No reply is running. Ctrl-C stops one.")


def _unload(repl: "Repl", _: str) -> None:
    driver = repl.driver
    if driver.session.engine.phase is EnginePhase.LOADING and not repl.console.typed:
        driver.settle(loaded=True)  # who types stops it by this; a script comes only too early
    if driver.session.engine.phase is EnginePhase.IDLE:
        repl.console.note("The model gives its memory back; it loads again when you ask.")
    driver.perform(driver.session.unload())


COMMANDS: dict[str, Command] = {
    "stop": _stop,
    "new_chat": new,
    "chats": listed,
    "open": opened,
    "title": title,
    "delete_chat": delete,
    "restore_chat": restore,
    "fork": fork,
    "export": export,
    "import": imported,
    "branches": branches,
    "regenerate": again,
    "edit": edit,
    "continue": continue_,
    "older": older,
    "newer": newer,
    "copy_message": copy,
    "copy_code": code,
    "scroll_end": end,
    "choose_model": model,
    "pull": processes.pull,
    "adapter": adapter,
    "unload": _unload,
    "system_prompt": system,
    "settings": settings,
    "thinking": thinking,
    "gauges": gauges,
    "explain": why,
    "what_if": processes.what_if,
    "convert": processes.convert,
    "editor": editor,
    "attach": attach,
    "detach": detach,
    "ask_guide": processes.ask,
    "help": _help,
    "leave": _leave,
}
"""By the registry's ids."""
