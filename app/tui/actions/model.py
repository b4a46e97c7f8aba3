"""Which model, with which settings: the dialogs that change them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tokamac.engine.options import Sampling

from ...chat.commands import apply_choice, save_settings
from ...chat.preferences import Written
from ...sanitise import sanitise_line
from ...settings import Settings, gigabytes_of
from ..model_library import load_model

if TYPE_CHECKING:
    from ..screens.chat import ChatScreen
    from ..screens.settings import Chosen


def choose_model(chat: "ChatScreen", name: str) -> None:
    """Load the model ``name``, or ask for one. It is downloaded first if need be."""
    if name:
        take_model(chat, name)
    else:
        models(chat, "")


def models(chat: "ChatScreen", written: str) -> None:
    """Ask for a model; ``search WORDS``, or words alone, begin with a search."""
    from ..screens.model import ModelScreen

    words = written.removeprefix("search ").strip()

    def chosen(model: str | None) -> None:
        chat.what_ifs.asked_enough()
        if model is not None:
            take_model(chat, model)

    screen = ModelScreen(
        chat.library, chat.session, lambda model: what_if(chat, model), lambda: unload(chat, ""), text=words
    )
    chat.app.push_screen(screen, chosen)


def take_model(chat: "ChatScreen", model: str) -> None:
    """Load a model from this disk, or download it in the background and load it then."""
    if chat.library.must_be_downloaded(model):
        chat.library.choose_another()
        chat.library.downloads.start(model, loads=True)
        shows = chat.session.keymap.key("choose_model")
        chat.tell(f"Downloading {sanitise_line(model)}. It loads when it is complete. {shows} shows the progress.")
    else:
        load_model(chat, model)


def unload(chat: "ChatScreen", _: str) -> None:
    """Free the model's memory now."""
    chat.perform(chat.session.unload())


def what_if(chat: "ChatScreen", model: str) -> None:
    """Compare a model, this one or another, in other settings or on other machines."""
    chat.what_ifs.open(chat.app, model or chat.session.engine.load.model)


def convert(chat: "ChatScreen", model: str) -> None:
    """Quantize a model, this one or another; load the result if the user wants it at once."""
    from ..screens.convert import ConvertScreen

    library = chat.library
    screen = ConvertScreen(model or chat.session.engine.load.model, library.conversions, library.models_folder)
    chat.app.push_screen(screen, lambda folder: load_model(chat, folder) if folder is not None else None)


def system_prompt(chat: "ChatScreen", _: str) -> None:
    """Edit the system prompt. Unsaved text stays with the chat as a draft."""
    from ..screens.settings import SystemScreen

    preferences, drafts = chat.preferences, chat.preferences.system_drafts
    earlier = drafts.of(_open_id(chat))

    def keep(prompts: Mapping[str, str]) -> None:
        save_settings(chat, replace(preferences.settings, system_prompts=dict(prompts)))

    def leave(draft: Written | None) -> None:
        drafts.keep(_open_id(chat), draft)
        if draft is not None and draft != earlier:
            shows = chat.session.keymap.key("system_prompt")
            chat.tell(f"Not applied. Your text stays in this chat as a draft until you quit tokamac. {shows} shows it.")

    def chosen(written: Written | None) -> None:
        if written is not None:
            drafts.keep(_open_id(chat), None)
            apply_choice(chat, preferences.choose_system(written.text, own=written.own))
            where = "this chat" if written.own else "every chat without its own"
            applies = f"The system prompt applies to {where}, from the next message on."
            chat.tell(applies if written.text else f"No system prompt in {where}.")

    current = Written(chat.session.system, preferences.own.system is not None)
    chat.app.push_screen(SystemScreen(current, preferences.library(), keep, draft=earlier, leave=leave), chosen)


def _open_id(chat: "ChatScreen") -> str | None:
    """Return the ID of the open chat; None of one that is not saved, or not yet."""
    return None if chat.recording is None else chat.recording.chat


def settings(chat: "ChatScreen", _: str) -> None:
    """Edit sampling, KV and memory settings."""
    from ..screens.settings import Chosen, SettingsScreen

    session, known = chat.session, chat.preferences.settings
    recommended = session.engine.info.recommended if session.engine.info is not None else Sampling()
    own = chat.preferences.own.sampling is not None
    limit = gigabytes_of(session.engine.load.memory)
    current = Chosen(session.sampling, session.engine.load.kv, session.idle.after_min, own, limit, known.template)
    screen = SettingsScreen(current, recommended, known.sampling, chat.do)
    chat.app.push_screen(screen, lambda chosen: _apply(chat, chosen))


def _apply(chat: "ChatScreen", chosen: "Chosen | None") -> None:
    if chosen is None:
        return
    session, known = chat.session, chat.preferences.settings
    load = replace(session.engine.load, kv=chosen.kv, memory=Settings(memory_gb=chosen.memory_gb).memory_bytes)
    session.idle.after_min = chosen.unload_after_min
    chat.chosen.kv = chosen.kv
    loaded = chosen.kv == session.engine.load.kv and session.engine.info is not None
    known = replace(
        known,
        kv=chosen.kv if loaded else known.kv,  # else once a model has loaded with it
        unload_after_min=chosen.unload_after_min,
        memory_gb=chosen.memory_gb
        if load.memory != session.engine.load.memory
        else known.memory_gb,  # a flag is for one run
    )
    save_settings(chat, known)
    apply_choice(chat, chat.preferences.choose_sampling(chosen.sampling, own=chosen.own))
    if chosen.template != chat.preferences.settings.template:
        save_settings(chat, replace(chat.preferences.settings, template=chosen.template))
        chat.preferences.give(session)
    if load != session.engine.load:
        chat.load(load)
