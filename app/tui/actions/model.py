"""Which model, with which settings: the dialogs that change them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ...chat import commands
from ...chat.commands import apply_choice, apply_sheet, current_sheet, save_settings
from ...chat.preferences import Written
from ...sanitise import sanitise_line
from ...settings_form import Sheet

if TYPE_CHECKING:
    from ..screens.chat import ChatScreen


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
        chat.library.load(model)


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
    chat.app.push_screen(screen, lambda folder: library.load(folder) if folder is not None else None)


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


def tools(chat: "ChatScreen", written: str) -> None:
    """Show the list of tools; with words, do what they say."""
    from ..screens.tools import ToolsScreen

    if written:
        commands.tools(chat, written)
        return
    commands.listed_tools(chat)  # or it says why there are none
    screen = ToolsScreen(
        lambda: commands.listed_tools(chat),
        lambda name: commands.switch_tools(chat, [name], on=None),
        lambda name: commands.ask_again(chat, [name]),
    )
    chat.app.push_screen(screen)


def settings(chat: "ChatScreen", _: str) -> None:
    """Edit all settings in one sheet."""
    from ..screens.settings import SettingsScreen

    session, known = chat.session, chat.preferences.settings
    everywhere = Sheet(known.template, known.sampling)

    def chosen_apart() -> dict[str, bool]:
        now = chat.preferences.settings
        return {"theme": bool(now.theme), "keys": bool(now.keys)}

    screen = SettingsScreen(
        current_sheet(chat),
        everywhere,
        session.engine.info,
        do=chat.do,
        profile=session.profile,
        chosen_apart=chosen_apart,
    )
    chat.app.push_screen(screen, lambda sheet: _apply(chat, sheet))


def _apply(chat: "ChatScreen", sheet: Sheet | None) -> None:
    if sheet is not None:
        apply_sheet(chat, sheet)
        chat.show_panel()
        chat.show()


def profile(chat: "ChatScreen", written: str) -> None:
    """Choose a profile, or do with profiles what is written."""
    from ..screens.profiles import ProfilesScreen

    if written:
        commands.profile(chat, written)
    else:
        chat.app.push_screen(ProfilesScreen(chat), lambda name: None if name is None else use(chat, name))


def use(chat: "ChatScreen", name: str) -> None:
    """Apply the profile that was chosen; "" is none."""
    chat.run_command(lambda: commands.use_profile(chat, name))
