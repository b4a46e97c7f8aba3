"""What actions do in the plain chat: most list something that the screen has a dialog for."""

import asyncio
import queue
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tokamac.engine.errors import OptionError
from tokamac.engine.events import TextChunk
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.options import KVSpec

from .. import INTERRUPTED, WRONG_USAGE
from ..backend.client import BackendEvent, killed_by
from ..backend.processes import (
    ConversionLine,
    Converter,
    Ended,
    HubModelLine,
    LineProcess,
    Pulled,
    Puller,
    PullLine,
    PullProgress,
    Refused,
    ShellCommand,
    ShellEnding,
    StageLine,
    converter_command,
    models_command,
    pull_arguments,
    search_arguments,
    user_shell,
    working_folder,
)
from ..backend.protocol import LookedAt, ReplyEvent
from ..chat import actions, commands, setup
from ..chat.actions import ACTIONS
from ..chat.attachments import Draft, output_of, pasted_picture, read_named, size_text
from ..chat.connection import GuideChat
from ..chat.controller import Bridge, RefusedError, first_question, recording_of
from ..chat.external_programs import NotTakenError, copied_picture
from ..chat.figures import LISTED_FIGURES, explain, listed
from ..chat.listing import EXCERPT, MeaningSearch, ago, date_of, excerpt, part, place_of
from ..chat.settings_form import Form, whole_number
from ..chat.steps import EnginePhase
from ..models.jobs import ConversionJob, ConversionPhase
from ..models.local import FOLDERS_FILE, Folders, hub_cache, lasting, models_on_disk
from ..store.values import Attachment, Hit, StoredChat
from ..text import units
from ..text.sanitise import sanitise, sanitise_line
from ..text.units import count, short, size
from ..tools.web import is_address
from .console import interruptible
from .view import PlainView, Rarely, WrittenConversion, last_turn, outline

if TYPE_CHECKING:
    from ..chat.reply_steps import ReplySteps

# Versions are listed as a numbered, nested outline.


MOST_LISTED = 20


# Conversations ------------------------------------------------------------------------------------------------------------


def chats(view: PlainView, words: str) -> None:
    store, now = recording_of(view.chat).store, time.time()
    found = store.chats(words, limit=MOST_LISTED, pinned_first=True)
    lines = [_chat_line(chat, now) for chat in found]
    view.chat.listed = tuple(chat.id for chat in found)
    if words:
        hits = store.search(words, MOST_LISTED)
        lines += map(_hit_line, hits)
        view.chat.listed += tuple(place_of(hit) for hit in hits)
    _show_found(view, lines, "No matches." if words else "No chats yet.")


def _hit_line(hit: Hit) -> str:
    return f"{hit.title}, {hit.file or hit.role}: {part(hit)} ({place_of(hit)})"


def _show_found(view: PlainView, lines: Sequence[str], nothing: str) -> None:
    if lines:
        view.show("\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1)))
        view.console.aside("/open NUMBER or ID opens one.")
    else:
        view.show(nothing)


def find_meaning(view: PlainView, words: str) -> None:
    if not words:
        view.tell("Write what you look for after the command: /meaning why is decoding slow")
        return
    preferences = view.chat.preferences
    search = MeaningSearch.here(recording_of(view.chat).file, preferences.settings, preferences.home)
    rarely = Rarely()

    def tell(done: int, total: int) -> None:
        if done and rarely.due():
            view.tell(f"{done:,} of {total:,} passages are read.")

    try:
        if (price := search.price()).unread:
            view.tell(f"{price} Ctrl-C stops it; what was read is kept.")
        hits = search.find(words, tell)
    finally:
        search.close()
    view.chat.listed = tuple(place_of(hit) for hit in hits)
    _show_found(view, list(map(_hit_line, hits)), "No chats yet.")


def show_turn(view: PlainView, key: str) -> None:
    """Print the turn of a message that was gone to."""
    turns = view.chat.session.turns
    at = next((at for at, turn in enumerate(turns, 1) if int(key) in (turn.key, turn.reply_key)), len(turns))
    view.show(last_turn(turns[:at], len(turns)))


def _chat_line(chat: StoredChat, now: float) -> str:
    notes = [ago(now - chat.updated_at), date_of(chat.updated_at, now)]
    notes += ["pinned"] if chat.pinned_at is not None else []
    notes += [f"in {chat.folder}"] if chat.folder else []
    return f"{chat.title or 'untitled'}, {', '.join(notes)} ({chat.id})"


# Messages and versions ----------------------------------------------------------------------------------------------------


def branches(view: PlainView, number: str) -> None:
    """List the versions, or switch to one by its number in the last list."""
    tree = view.chat.session.conversation.tree
    if not number or view.outline is None or view.outline.tree is not tree:
        view.outline = outline(tree)
    keys, lines = view.outline.keys, view.outline.lines
    wanted = whole_number(number) or 0
    if not keys:
        raise RefusedError(commands.one_version(view.chat))
    if not number:
        view.show("\n".join(lines))
        view.console.aside("/branches NUMBER switches to that version.")
    elif 0 < wanted <= len(keys):
        view.chat.go(keys[wanted - 1])
    else:
        raise RefusedError(f"There is no version {number:.40}: /branches lists them, 1 to {len(keys)}.")


def first_turn(view: PlainView, _: str) -> None:
    view.show(last_turn(view.chat.session.turns[:1]))


def last_turn_again(view: PlainView, _: str) -> None:
    view.show(last_turn(view.chat.session.turns))


def context(view: PlainView, number: str) -> None:
    draft = view.line.draft
    view.chat.perform(view.chat.session.count_context(draft))
    view.settle_counts()
    use = view.chat.session.context_use(draft)
    wanted = whole_number(number) or 0
    if number and not 0 < wanted <= len(use.rows):
        raise RefusedError(f"There is no part {number:.40}: /context lists them, 1 to {len(use.rows)}.")
    if number:
        row = use.rows[wanted - 1]
        view.tell(use.consequence(wanted - 1))
        if row.key:
            view.chat.perform(view.chat.session.prune(row.key, row.file))
        return
    for at, row in enumerate(use.rows, 1):
        left = ", left out" if row.left_out else ", pinned" if row.pinned else ""
        view.show(f"{at}. {row.kind}, {units.count(row.tokens)} tokens{left}: {row.name[:EXCERPT]}")
    view.show(f"{units.count(use.used)} tokens used, {units.count(use.free)} free of {units.count(use.capacity)}.")
    view.console.aside("/context NUMBER leaves a file or a turn out, or sends it again.")


def attach(view: PlainView, path: str) -> None:
    if not path:
        raise RefusedError("Write the file after the command: /attach notes.md")
    if is_address(path):
        commands.fetch_page(view.chat, path, partial(_attach, view))
    else:
        _attach(view, read_named(path, Path()))


def paste(view: PlainView, _: str) -> None:
    try:
        _attach(view, pasted_picture(copied_picture()))
    except NotTakenError as error:
        raise RefusedError(f"There is no picture to paste: {error}.") from None


def shell(view: PlainView, text: str) -> None:
    """Run a shell command, with the user's consent, and attach its output."""
    if not text:
        raise RefusedError("Write the command after the !, such as !ls.")
    if not view.console.typed:
        view.failed = True
        raise RefusedError("Nobody is here to allow a shell command. To send this as a prompt, put a space before it.")
    folder = working_folder()
    view.tell(
        f"This command runs in {folder} with {Path(user_shell()).name}; its output is attached to the next prompt:"
    )
    view.console.quote([("!", text)])
    try:
        allowed = view.console.read("run it? [y]es, [n]o> ").strip().lower() in ("y", "yes")
    except EOFError:
        allowed = False
    if not allowed:
        view.tell("The command was not run.")
        return
    command = ShellCommand(text, folder)
    with view.away(), interruptible(command.stop):
        output = command.run()
    if output.how:
        view.tell(f"The command failed: {output.how}.")
    if output.text or output.ending is not ShellEnding.STOPPED:
        _attach(view, output_of(output))


def _attach(view: PlainView, made: Attachment) -> None:
    draft = view.line.draft
    others = tuple(each for each in draft.attachments if each.name != made.name)
    view.line.draft = Draft(draft.text, (*others, made))
    session = view.chat.session
    if steps := session.count_context(view.line.draft):  # what it costs, which the engine knows
        view.chat.perform(steps)
        view.settle_counts()
    price = size_text(made, session.tokens(made), session.picture(made))
    view.tell(f"Attached to the next prompt: {made.name}, {price}.")


def detach(view: PlainView, name: str) -> None:
    draft = view.line.draft
    named = [each for each in draft.attachments if name in ("", each.name)]
    if not named:
        raise RefusedError(f"Nothing called {name} is attached." if name else "Nothing is attached.")
    view.line.draft = Draft(draft.text, tuple(each for each in draft.attachments if each is not named[-1]))
    view.tell(f"Detached: {named[-1].name}.")


# Models and settings ------------------------------------------------------------------------------------------------------


def model(view: PlainView, name: str) -> None:
    session = view.chat.session
    if not name:
        view.show(session.engine.load.model)
        return
    name = lasting(setup.full_name(view.chat, name))
    if not view.console.typed:  # a script's line: the model before is loaded first, so that there is one to return to
        view.wait()
    view.chat.chosen.model = name
    view.chat.load(session.engine.load.for_model(name, *view.chat.preferences.settings.beside(name)))
    if session.engine.info is not None and session.engine.load.model == name:
        view.tell(f"{session.engine.info.name} is loaded.")


def unload(view: PlainView, _: str) -> None:
    if view.chat.session.engine.phase is EnginePhase.LOADING and not view.console.typed:
        view.wait()  # typed, the command stops the loading; in a script it is only early
    if view.chat.session.engine.phase is EnginePhase.IDLE:
        view.tell("The model is unloaded. It reloads when you send a prompt.")
    view.chat.perform(view.chat.session.unload())


# Figures ------------------------------------------------------------------------------------------------------------------


def gauges(view: PlainView, name: str) -> None:
    if not name:
        view.show(listed(view.chat.session, known=False))
        view.console.aside("/gauges NAME explains a figure: its formula, inputs and source.")
        return
    wanted = name.casefold()
    known = {figure: explain(figure, view.chat.session) for figure in LISTED_FIGURES}
    named = [each for figure, each in known.items() if wanted in (figure, each.name.casefold())]
    if not named:
        raise RefusedError(f"There is no figure {name}. /gauges lists them.")
    figure = named[0]
    lines = [f"{figure.name}: {figure.value}" + (f" ({figure.why})" if figure.why else ""), figure.meaning]
    lines.append(f"How: {figure.name} = {figure.formula}")
    lines += [f"From: {each.name}: {each.value} ({each.source})" for each in figure.inputs]
    view.show("\n".join([*lines, f"Source: {figure.source}"]))


def explain_reply(view: PlainView, turn: str) -> None:
    from ..reports import verdict
    from ..reports.cache_use import why

    turns = view.chat.session.turns
    wanted = whole_number(turn) or 0
    if turn and not 0 < wanted <= len(turns):
        raise RefusedError(f"There is no turn {turn:.40}. This chat has {len(turns)}.")
    replies = [each.reply for each in (turns[wanted - 1 : wanted] if turn else turns)]
    measured = [reply for reply in replies if reply is not None and reply.metrics is not None]
    if not measured:
        raise RefusedError("There is no reply to explain yet." if not turn else f"Nothing was measured of turn {turn}.")
    reply = view.chat.session.engine.with_ceiling(measured[-1])
    assert reply.metrics is not None
    lines = [] if reply.diagnosis is None else verdict.lines(reply.diagnosis)
    again = [] if reply.cache is None else [*filter(None, [why(reply.cache)])]
    view.show("\n".join([verdict.sentence(reply.metrics, reply.diagnosis), *again, *lines]))


# The commands -------------------------------------------------------------------------------------------------------------


def editor(view: PlainView, _: str) -> None:
    """Write a prompt in the user's own editor, and send it."""
    text = view.edited(view.line.draft.text)
    if text.strip():
        view.show(text)
        view.send(text.strip())


def open_(view: PlainView, _: str) -> None:
    view.tell("Write the number or the ID of a chat after the command: /open 1. /chats lists them.")


def edit_earlier(view: PlainView, _: str) -> None:
    asked = commands.asked_before(view.chat)
    view.show("\n".join(f"{number}. {excerpt(turn.prompt)}" for number, turn in enumerate(asked, 1)))


def links(view: PlainView, _: str) -> None:
    found = commands.links_of(view.chat)
    view.show("\n".join(f"{sanitise_line(link.text)}: {link.address}" for link in found))


def settings(view: PlainView, _: str) -> None:
    form = Form(view.chat.session.engine.info)
    view.show(setup.listed_settings(form, form.texts(setup.current_sheet(view.chat))))


def system_prompt(view: PlainView, _: str) -> None:
    view.show(sanitise(view.chat.session.system) or "No system prompt.")


def profiles(view: PlainView, _: str) -> None:
    view.show(setup.listed_profiles(view.chat))


TOOLS_HINT = (
    "/tools on NAME turns one on in this chat, /tools off NAME off; after /tools ask NAME its calls ask again. "
    "tokamac help tools explains."
)


def prompt_files(view: PlainView, _: str) -> None:
    listed = commands.listed_prompts(view.chat)
    view.show("\n".join(f"/{name}: {told}" for name, told in listed) or "You have no prompts yet.")
    view.console.aside(
        f"/prompts edit NAME writes one, /prompts save NAME makes one of the last message. {commands.EXAMPLE}"
    )


def tools(view: PlainView, _: str) -> None:
    view.show("\n".join([*map(setup.tool_line, setup.listed_tools(view.chat)), TOOLS_HINT]))


def keys(view: PlainView, _: str) -> None:
    view.show("\n".join(map(setup.keys_line, view.chat.preferences.keymap.actions)))


def help_(view: PlainView, _: str) -> None:
    lines = [f"{action.usage}: {action.help}" for action in available()]
    lines += ["A line that ends with a backslash continues on the next one.", 'Lines between two """ are one prompt.']
    lines += ["A line that begins with ! is a shell command, unless a space or a backslash is before it."]
    view.show("\n".join(lines))


def stop(view: PlainView, _: str) -> None:
    view.tell("No reply is running. Ctrl-C stops one.")


# Ctrl-C stops the process. Progress is rare, since a screen reader would talk over everything. The guide has its own
# engine process, so the chat's model stays loaded.


HEAR_S = 1.0  # how often events are read during a process
BEGUN_S = 0.05  # how soon a process that was to stop before it had started is asked again
MODEL_FIRST = "Put the model first: /{} MODEL FLAGS. The default is the chat's model."
Line = TypeVar("Line")


def run_aside(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    *,
    meanwhile: Callable[[], None],
    stopping: Callable[[], None] = lambda: None,
) -> Ended:
    """Run ``process`` to its end; its status is INTERRUPTED if Ctrl-C stopped it.

    Args:
        process: Ctrl-C stops it, even before it has started.
        take: receives every line.
        meanwhile: polled, so that engine events are handled.
        stopping: called once on a stop.

    Raises:
        OSError: it could not be started.
    """
    return asyncio.run(_run_command(process, arguments, take, meanwhile, stopping))


async def _run_command(
    process: LineProcess[Line],
    arguments: Sequence[str],
    take: Callable[[Line], None],
    meanwhile: Callable[[], None],
    stopping: Callable[[], None],
) -> Ended:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    with interruptible(lambda: loop.call_soon_threadsafe(stop.set)):
        run = asyncio.ensure_future(process.run(arguments, take))
        stopper = asyncio.ensure_future(_stop(process, run, stop, stopping))
        while not (await asyncio.wait({run}, timeout=HEAR_S))[0]:
            meanwhile()
        stopper.cancel()
        end = run.result()
        return replace(end, status=INTERRUPTED) if stop.is_set() and end.status else end


async def _stop(
    process: LineProcess[Line], run: asyncio.Future[Ended], stop: asyncio.Event, stopping: Callable[[], None]
) -> None:
    await stop.wait()
    stopping()
    while not run.done():
        await process.interrupt()
        await asyncio.wait({run}, timeout=BEGUN_S)


def words_of(written: str, model: str) -> tuple[str, list[str]]:
    """Return the leading model, else ``model``, and the flags split as in a shell. Raises OptionError."""
    try:
        words = shlex.split(written)
    except ValueError as error:
        raise OptionError(f"{written} can't be read: {error}", "Close the quotation marks.") from None
    return (words[0], words[1:]) if words and not words[0].startswith("-") else (model, words)


def misplaced(command: str, written: str, end: Ended) -> str:
    """Return a hint if arguments that begin with a flag were refused: the model may come last."""
    return MODEL_FIRST.format(command) if end.status == WRONG_USAGE and written.startswith("-") else ""


def why(end: Ended) -> str:
    """Return why a process failed: a signal, or its last words."""
    if end.status < 0:
        return killed_by(-end.status)
    return end.last_line or f"exit status {end.status}"


PLANNED_TYPED = " in the background. /jobs shows how far it is, and stops it."
PLANNED_PIPED = ". Ctrl-C stops it; /convert resumes it."
# Flags that are added where they belong; kept with a plan, they would plan it again for ever.
OURS = ("--dry-run", "--json")


def convert(view: PlainView, written: str) -> None:
    """Plan a quantization or run the last plan; in the background if a person types."""
    if (running := view.jobs.conversions.running) is not None:
        raise RefusedError(f"{running.source} is still being converted. /jobs shows how far it is, and stops it.")
    if view.planned and not written and view.console.typed:
        *flags, _, model = view.planned
        view.jobs.convert(WrittenConversion(model, tuple(flags)))
        view.tell(f"Converting {model} in the background. /jobs shows how far it is, and stops it.")
        return
    if view.planned and not written:
        if _run(view, view.planned, dry_run=False) is ConversionPhase.DONE:
            view.planned = ()
        return
    view.planned = ()
    model, flags = words_of(written, view.chat.session.engine.load.model)
    placed = any(flag.startswith(("-o", "--output", "--into")) for flag in flags)
    into = () if placed else (f"--into={view.chat.preferences.settings.models_path}",)
    arguments = (*into, *(flag for flag in flags if flag not in OURS), "--", model)
    if _run(view, arguments, dry_run=True, written=written) is ConversionPhase.PLANNED:
        view.planned = arguments
        view.tell(f"/convert without arguments runs this plan{PLANNED_TYPED if view.console.typed else PLANNED_PIPED}")


def _run(view: PlainView, arguments: tuple[str, ...], *, dry_run: bool, written: str = "") -> ConversionPhase:
    """Plan or convert and report; return the final phase. written: the command's argument."""
    job, rarely = ConversionJob(time.monotonic), Rarely()
    job.begin(dry_run=dry_run)

    def receive(line: ConversionLine) -> None:
        job.receive(line)
        if isinstance(line, StageLine) and rarely.due():
            view.tell(f"{line.stage}: {_share(line)}")

    how = ["--json", *(["--dry-run"] if dry_run else []), *arguments]
    try:
        converter = Converter(converter_command())
        end = run_aside(converter, how, receive, meanwhile=view.rest, stopping=job.stop)
    except OSError as error:
        view.tell(f"The conversion could not be started: {error}")
        return ConversionPhase.FORM
    job.ended(end)
    if text := job.text():
        view.show(text)
    if job.problem:
        view.tell(job.problem)
    if remark := misplaced("convert", written, end):
        view.tell(remark)
    if job.converted is not None:
        view.tell(f"/model {Path(job.converted.path).absolute()} loads it.")
    return job.phase


def _share(at: StageLine) -> str:
    written = size if at.unit == "bytes" else count
    of = "" if at.total is None else f" of {written(at.total)}"
    return f"{written(at.done)}{of}{'' if at.unit == 'bytes' else ' steps'}"


def pull(view: PlainView, model: str) -> None:
    """Download, in the background if a person types; partial files stay."""
    if view.console.typed:
        view.jobs.download(model)
        view.tell(f"Downloading {model} in the background. /jobs shows how far it is, and stops it.")
        return
    view.tell(f"Downloading {model}. Ctrl-C stops it; the same command resumes it.")
    download = _Download(view, model)
    try:
        end = run_aside(Puller(models_command()), pull_arguments(model), download.receive, meanwhile=view.rest)
    except OSError as error:
        view.tell(f"{model} was not downloaded: {error}")
    else:
        view.tell(download.result(end))


class _Download:
    def __init__(self, view: PlainView, model: str) -> None:
        self._console = view.console
        self._model = model
        self._rarely = Rarely()
        self._said = ""

    def receive(self, line: PullLine) -> None:
        match line:
            case PullProgress(done, total):
                if self._rarely.due():
                    of = "" if total is None else f" of {size(total)}"
                    self._console.note(f"downloading {self._model}: {size(done)}{of}")
            case Pulled(bytes=nbytes):
                self._said = f"{self._model} is downloaded, {size(nbytes)}. /model {self._model} loads it."
            case Refused(error, hint):
                self._said = f"{self._model} was not downloaded: {error}. {hint}".strip()
            case _:
                pass

    def result(self, end: Ended) -> str:
        if end.status == INTERRUPTED:
            return f"Stopped. /pull {self._model} resumes it."
        return self._said or f"{self._model} was not downloaded: {why(end)}"


def models(view: PlainView, written: str) -> None:
    word, _, words = written.partition(" ")
    if word == "search" and words.strip():
        view.tell("Searching Hugging Face. Ctrl-C stops it.")
        found: dict[str, HubModelLine] = {}
        problem: list[str] = []

        def receive(line: PullLine) -> None:
            match line:
                case HubModelLine():
                    found[line.id] = line
                case Refused(error, hint):
                    problem.append(f"{error}. {hint}".strip())
                case _:
                    pass

        try:
            end = run_aside(Puller(models_command()), search_arguments(words), receive, meanwhile=view.rest)
        except OSError as error:
            view.tell(f"The search could not be started: {error}")
            return
        for each in found.values():
            facts = (
                size(each.nbytes),
                f"context {short(each.context)}",
                each.licence or "licence unknown",
                each.good_for,
            )
            view.show(f"{each.id}: {', '.join(fact for fact in facts if fact)}")
        if problem or end.status:
            view.tell("Stopped." if end.status == INTERRUPTED else (problem or [why(end)])[0])
        else:
            view.tell("/pull ID downloads one." if found else "Nothing found for these words that runs here.")
    elif written:
        view.tell("/models lists the models here, /models search WORDS searches Hugging Face.")
    else:
        folder = view.chat.preferences.settings.models_path
        for model in models_on_disk(
            hub_cache(), Folders(view.chat.preferences.home / FOLDERS_FILE).all(), folder
        ).models:
            state = "" if model.whole else ", incomplete: /pull resumes it"
            context = "" if model.context is None else f", context {short(model.context)}"
            place = f", in {model.path.parent}" if model.home in ("models", "other") else ""
            view.show(
                f"{model.model}: {size(model.nbytes)}{context}{place}{state}{f'. {model.worse}' if model.worse else ''}"
            )
        view.console.aside("/model NAME loads one. /models search WORDS searches Hugging Face.")


def what_if(view: PlainView, written: str) -> None:

    model, flags = words_of(written, view.chat.session.engine.load.model)
    asked = first_question(view.chat.session, model)
    own_size = any(flag.startswith(("--context", "--prompt")) for flag in flags)
    size = () if own_size else (f"--context={asked.context}", f"--prompt={asked.prompt}")
    lines: list[str] = []
    inspect = LineProcess([sys.executable, "-m", "tokamac.app.cli", "inspect", "--table"], _text)
    try:
        asks = [*size, *_kv_flags(asked.kv, flags), *flags, "--", model]
        end = run_aside(inspect, asks, lines.append, meanwhile=view.rest)
    except OSError as error:
        view.tell(f"The comparison could not be started: {error}")
        return
    if lines:
        view.show("\n".join(lines))
    for remark in (_remark(end), misplaced("whatif", written, end)):
        if remark:
            view.tell(remark)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\n")


def _remark(end: Ended) -> str:
    if end.status == INTERRUPTED:
        return "Stopped."
    if end.status < 0 or (end.status and not end.last_line):
        return f"The comparison failed: {why(end)}"
    return end.last_line


def _kv_flags(kv: KVSpec, own: Sequence[str]) -> Iterator[str]:
    """Yield the flags for ``kv`` that the command supports and the user's ``own`` don't override."""
    # Bits and window of one override drop the chat's related ones: the combination may be invalid.
    given = {flag.partition("=")[0] for flag in own}
    if kv.quantized and "--kv-bits" not in given:
        yield f"--kv-bits={kv.key_bits},{kv.value_bits}"
        yield f"--kv-group-size={kv.group_size}"
    if kv.window is not None and "--kv-window" not in given:
        yield f"--kv-window={kv.window}"
        yield f"--kv-keep={kv.keep}"


TAIL = 40  # characters of what a new version goes on from
LISTED_STEPS = 12  # slow steps that /steps lists


def steps(view: PlainView, written: str) -> None:
    """List the last reply's steps, explain one, or continue from it with another token."""
    from ..chat.reply_steps import ReplySteps, visible

    found = view.chat.session.conversation.reply_at(None)
    if found is None or found.reply is None:
        raise RefusedError("There is no reply to walk through yet.")
    shown = ReplySteps(found.reply)
    if not written:
        view.show("\n".join(shown.summary(LISTED_STEPS)))
        view.console.aside(f"/steps and a number from 1 to {len(shown):,} explains a step and its likely tokens.")
        return
    number, choice = _numbers(written)
    if shown.recorded and not 1 <= number <= len(shown):
        raise RefusedError(f"This reply has {len(shown):,} steps.")
    _look(view, found.key, shown)
    if not 1 <= number <= len(shown):
        raise RefusedError(f"This reply has {len(shown):,} steps.")
    if choice is not None:
        begun = shown.branch(number - 1, choice)
        tail = visible((begun.thinking + begun.text)[-TAIL:])
        view.tell(f"A new version of the reply goes on from “…{tail}”.")
        view.chat.reply(lambda: view.chat.session.branch_from(found.key, begun))
        return
    lines = (f"{line.label:<9} {line.text}".rstrip() for line in shown.lines(number - 1))
    view.show("\n".join([shown.title(number - 1), *lines]))
    if remark := shown.status():
        view.tell(remark)


def _look(view: PlainView, key: int, shown: "ReplySteps") -> None:
    from ..chat.reply_steps import why_not

    view.wait()
    session = view.chat.session
    if why := why_not(session, shown.reply):
        shown.receive(LookedAt(key, ended=True, error=why))
    else:
        view.look_again(shown.question(key, session.prompt_before(key), session.template), shown.receive)
    if shown.tokens:
        session.conversation.looked[key] = shown.tokens


def sure(view: PlainView, _: str) -> None:
    """Show the last reply with its unlikely words in brackets, each with its step."""
    from ..chat.reply_steps import ReplySteps, alternatives, doubt, quoted

    found = view.chat.session.conversation.reply_at(None)
    if found is None or found.reply is None:
        raise RefusedError("There is no reply yet.")
    shown = ReplySteps(found.reply)
    _look(view, found.key, shown)
    view.show("".join(f"[{each.text}]" if doubt(each) > 1 else each.text for each in shown.tokens))
    unlikely = [at for at in range(len(shown)) if (token := shown.token(at)) is not None and doubt(token) > 1]
    tokens = [(at, token) for at in unlikely[:LISTED_STEPS] if (token := shown.token(at)) is not None]
    view.show("\n".join(f"step {at + 1}: {quoted(token.text)} {alternatives(token)}" for at, token in tokens))
    view.tell(
        shown.status() or "In brackets: less likely than not. /steps STEP TOKEN goes on with another TOKEN, 1 to 5."
    )


def _numbers(written: str) -> tuple[int, int | None]:
    """Parse a step and optionally an alternative token. Raises RefusedError."""
    numbers = [whole_number(word) for word in written.split()]
    match numbers:
        case [int(step)]:
            return step, None
        case [int(step), int(choice)]:
            return step, choice
        case _:
            raise RefusedError(
                "Write the number of a step after the command: /steps 12. /steps 12 2 continues with its token 2."
            )


Events = queue.SimpleQueue[BackendEvent | None]  # what the guide's process says; None is Ctrl-C


def ask(view: PlainView, question: str) -> None:
    """Ask the guide, statelessly; its process ends after the answer."""
    if not question:
        view.tell("Write the question after the command: /guide What does --kv-bits 8,4 do?")
        return
    events: Events = queue.SimpleQueue()
    bridge = view.chat.bridge.another()
    bridge.post = lambda event, _: events.put(event)
    with interruptible(lambda: events.put(None)):
        bridge.start()
        try:
            said = _answer(view, bridge, question, events)
        finally:
            bridge.end()
    if said:
        view.tell(said)


def _answer(view: PlainView, bridge: Bridge, question: str, events: Events) -> str:
    """Print the answer as it streams; return a remark on its end, or ""."""
    guide = GuideChat(private=view.chat.private)
    for request in (*guide.start(), *guide.ask(question)):
        bridge.ask(request)
    bridge.set_busy(True)
    view.console.begin(GUIDE)
    for event in as_they_come(events, meanwhile=view.rest):
        if event is None:
            break
        if isinstance(event, ReplyEvent) and isinstance(event.event, TextChunk):
            view.console.grow(event.event.text, event.event.kind)
        for request in guide.on_event(event):
            bridge.ask(request)
        if not guide.busy:
            break
    view.console.end()
    return "The guide was stopped." if guide.busy else guide.problem


def as_they_come(events: Events, *, meanwhile: Callable[[], None]) -> Iterator[BackendEvent | None]:
    """Yield the guide's events forever. meanwhile: called by the clock, so that the chat's engine is polled."""
    heard_s = time.monotonic()
    while True:
        if time.monotonic() - heard_s >= HEAR_S:
            heard_s = time.monotonic()
            meanwhile()
        try:
            yield events.get(timeout=HEAR_S)
        except queue.Empty:
            continue


def jobs(view: PlainView, written: str) -> None:
    """List background jobs, or stop one by number, or the only one."""
    listed = view.jobs.lines()
    if not listed:
        raise RefusedError("No downloads or conversions. /pull and /convert start one.")
    word, _, rest = written.partition(" ")
    if not word:
        view.show("\n".join(f"{number}. {line}" for number, line in enumerate(listed, 1)))
        view.console.aside("/jobs stop NUMBER stops one.")
        return
    number = whole_number(rest.strip()) if rest.strip() else 1 if len(listed) == 1 else None
    if word != "stop" or number is None or not 1 <= number <= len(listed):
        raise RefusedError(f"Write /jobs stop and a number from 1 to {len(listed)}.")
    view.tell(view.jobs.stop(number))


# By the registry's ids; the other actions are in ``app/chat/commands``, or need the full screen.
LISTS: Mapping[str, Callable[[PlainView, str], None]] = {
    "stop": stop,
    "chats": chats,
    "find_meaning": find_meaning,
    "messages": show_turn,
    "open": open_,
    "branches": branches,
    "context": context,
    "scroll_top": first_turn,
    "scroll_end": last_turn_again,
    "edit_earlier": edit_earlier,
    "links": links,
    "choose_model": model,
    "models": models,
    "pull": pull,
    "jobs": jobs,
    "unload": unload,
    "settings": settings,
    "system_prompt": system_prompt,
    "profile": profiles,
    "tools": tools,
    "prompt_files": prompt_files,
    "keys": keys,
    "gauges": gauges,
    "explain": explain_reply,
    "steps": steps,
    "sure": sure,
    "what_if": what_if,
    "convert": convert,
    "editor": editor,
    "attach": attach,
    "detach": detach,
    "paste": paste,
    "shell": shell,
    "ask_guide": ask,
    "help": help_,
    "leave": lambda view, _: view.quit(),
}
DONE = frozenset((*commands.COMMANDS, *LISTS))  # the actions that need no screen


def available() -> Iterator[actions.Action]:
    """Yield the actions that have a command here."""
    return (action.for_plain for action in ACTIONS if action.slash and action.id in DONE)
