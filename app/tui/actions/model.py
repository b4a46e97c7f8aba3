"""The model, its adapter and the KV settings that were picked: what the next start begins with, once they are known to load.

Which model, with which settings: the dialogs that change them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tokamac.app.chat.models import is_id
from tokamac.app.chat.preferences import Written, sentences
from tokamac.app.chat.preferences import chosen as chosen_template
from tokamac.app.options import given_adapter
from tokamac.app.sanitise import sanitise_line
from tokamac.app.settings import Settings, gigabytes_of, with_adapter
from tokamac.app.tui.model_library import load_model
from tokamac.engine.errors import OptionError
from tokamac.engine.options import Sampling

if TYPE_CHECKING:
    from tokamac.app.tui.screens.chat import ChatScreen
    from tokamac.app.tui.screens.settings import Chosen


def choose_model(chat: "ChatScreen", name: str) -> None:
    """Load the model ``name``, or ask for one. What is not here is downloaded first."""
    from tokamac.app.tui.screens.model import ModelScreen

    if name:
        take_model(chat, name)
        return

    def chosen(model: str | None) -> None:
        chat.what_ifs.asked_enough()
        if model is not None:
            take_model(chat, model)

    screen = ModelScreen(chat.stock, chat.session, lambda model: what_if(chat, model), lambda: unload(chat, ""))
    chat.app.push_screen(screen, chosen)


def take_model(chat: "ChatScreen", model: str) -> None:
    """Load a model that is here; have one downloaded that is not, and loaded then. The chat goes on meanwhile."""
    if chat.stock.must_be_downloaded(model):
        chat.stock.choose_another()
        chat.stock.downloads.start(model, loads=True)
        shows = chat.session.keymap.key("choose_model")
        text = f"Downloading {sanitise_line(model)}, to be loaded once it is here. {shows} shows how far it is."
        chat.notify(text, markup=False, timeout=6)
    else:
        load_model(chat, model)


def pull(chat: "ChatScreen", model: str) -> None:
    """Have a model downloaded; it is not loaded."""
    if not is_id(model):
        chat.notify("Write /pull and a Hugging Face id, such as org/name.", severity="warning", markup=False)
    elif not chat.stock.must_be_downloaded(model):
        chat.notify(f"{sanitise_line(model)} is here already.", markup=False)
    else:
        chat.stock.downloads.start(model)


def adapter(chat: "ChatScreen", written: str) -> None:
    """Load the model with another adapter, or with none, and keep that for this model; or say which it has."""
    session = chat.session
    if not written:
        held = session.engine.load.adapter
        text = (
            "This model has no adapter. /adapter and a folder or a Hugging Face id adds one." if held is None else held
        )
        chat.notify(sanitise_line(text), markup=False, timeout=6)
        return
    chosen = given_adapter(written) or None
    chat.picked_adapter = session.engine.load.model, chosen
    chat.perform(session.choose(replace(session.engine.load, adapter=chosen)))


def unload(chat: "ChatScreen", _: str) -> None:
    """Give the model's memory back now."""
    chat.perform(chat.session.unload())


def what_if(chat: "ChatScreen", model: str) -> None:
    """Ask what a model, this one or another, would do otherwise, or elsewhere."""
    chat.what_ifs.open(chat.app, model or chat.session.engine.load.model)


def convert(chat: "ChatScreen", model: str) -> None:
    """Pack a model, this one or another, into fewer bits; the result is loaded if it is wanted at once."""
    from tokamac.app.tui.screens.model import ConvertScreen

    screen = ConvertScreen(model or chat.session.engine.load.model)
    chat.app.push_screen(screen, lambda folder: load_model(chat, folder) if folder is not None else None)


def system_prompt(chat: "ChatScreen", _: str) -> None:
    """Edit the system prompt. What is written and not used stays with the chat as a draft."""
    from tokamac.app.tui.screens.settings import SystemScreen

    memory, drafts = chat.memory, chat.memory.system_drafts
    earlier = drafts.of(_held(chat))

    def keep(prompts: Mapping[str, str]) -> None:
        chat.keep(replace(memory.settings, system_prompts=dict(prompts)))

    def leave(draft: Written | None) -> None:
        drafts.keep(_held(chat), draft)
        if draft is not None and draft != earlier:
            shows = chat.session.keymap.key("system_prompt")
            text = f"Not used: what you wrote stays in this chat as a draft until you leave tokamac. {shows} shows it."
            chat.notify(text, markup=False, timeout=6)

    def chosen(written: Written | None) -> None:
        if written is not None:
            drafts.keep(_held(chat), None)
            _kept(chat, memory.choose_system(written.text, own=written.own))
            where = "in this chat" if written.own else "in every chat without its own"
            text = f"The system prompt holds {where}, from the next message on."
            chat.notify(text if written.text else f"No system prompt {where}.", markup=False, timeout=4)

    current = Written(chat.session.system, memory.own.system is not None)
    chat.app.push_screen(SystemScreen(current, memory.library(), keep, draft=earlier, leave=leave), chosen)


def _held(chat: "ChatScreen") -> str | None:
    """Return the id of the chat that is held; None of one that nothing keeps, or not yet."""
    return None if chat.recording is None else chat.recording.chat


def _kept(chat: "ChatScreen", problem: str) -> None:
    """Let what was chosen hold, keep it with the chat, and say why it could not be kept, if it could not."""
    chat.memory.give(chat.session)
    if chat.recording is not None:
        chat.recording.keep_own()
    if problem:
        chat.notify(problem, severity="warning", markup=False)


def settings(chat: "ChatScreen", _: str) -> None:
    """Edit sampling, KV and memory settings."""
    from tokamac.app.tui.screens.settings import Chosen, SettingsScreen

    session = chat.session
    recommended = session.engine.info.recommended if session.engine.info is not None else Sampling()
    own = chat.memory.own.sampling is not None
    template = chat.memory.settings.template
    limit = gigabytes_of(session.engine.load.memory)
    current = Chosen(session.sampling, session.engine.load.kv, session.idle.after_min, own, limit, template)
    screen = SettingsScreen(current, recommended, chat.memory.settings.sampling)
    chat.app.push_screen(screen, lambda chosen: _take(chat, chosen))


def thinking(chat: "ChatScreen", text: str) -> None:
    """Say what the chat template is told in this chat, or tell it something else from the next message on."""
    session = chat.session
    if not text:
        chat.notify(sentences(session.template, session.engine.info), markup=False, timeout=8)
        return
    try:
        template = chosen_template(text, session.template, session.engine.info)
    except OptionError as error:
        chat.notify(error.one_line(), severity="warning", markup=False)
        return
    _kept(chat, chat.memory.choose_template(template, own=True))
    chat.notify(
        f"{sentences(template, None)} It holds in this chat, from the next message on.", markup=False, timeout=4
    )


def _take(chat: "ChatScreen", chosen: "Chosen | None") -> None:
    if chosen is None:
        return
    session, kv, minutes = chat.session, chosen.kv, chosen.unload_after_min
    load = replace(session.engine.load, kv=kv, memory=replace(Settings(), memory_gb=chosen.memory_gb).memory_bytes)
    session.idle.after_min = minutes
    chat.picked_kv = kv
    loads = kv == session.engine.load.kv and session.engine.info is not None
    kept = kv if loads else chat.memory.settings.kv  # else once a model has loaded with it
    limit = (
        chosen.memory_gb if load.memory != session.engine.load.memory else chat.memory.settings.memory_gb
    )  # a flag is for one run
    chat.keep(replace(chat.memory.settings, kv=kept, unload_after_min=minutes, memory_gb=limit))
    _kept(chat, chat.memory.choose_sampling(chosen.sampling, own=chosen.own))
    if chosen.template != chat.memory.settings.template:
        chat.keep(replace(chat.memory.settings, template=chosen.template))
        chat.memory.give(session)
    if load != session.engine.load:
        chat.perform(session.choose(load))


def keep_picked(chat: "ChatScreen") -> None:
    """Keep what was picked, now that it has loaded."""
    load, known = chat.session.engine.load, chat.memory.settings
    model = load.model if load.model == chat.picked else known.model
    kv = load.kv if load.kv == chat.picked_kv else known.kv
    adapters = known.adapters
    if chat.picked_adapter == (load.model, load.adapter):
        adapters = with_adapter(known, *chat.picked_adapter)
    if (model, kv, adapters) != (known.model, known.kv, known.adapters):
        chat.keep(replace(known, model=model, kv=kv, adapters=adapters))
