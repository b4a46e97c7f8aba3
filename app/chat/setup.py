"""What a chat runs with, and how one changes it: model, server, settings, profiles, tools and keys."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import groupby

from tokamac.engine.events import ToolCall
from tokamac.engine.hub.names import nearest
from tokamac.engine.options import FULL_PACE
from tokamac.engine.requirements import pip_install

from .. import system_files
from ..backend import processes
from ..backend.processes import working_folder
from ..backend.sharing import chat_socket
from ..models.local import hub_cache, is_id, is_short, lasting, must_be_downloaded, require
from ..options import given_adapter, given_draft
from ..settings import NO_PROFILE, Profile, differing, gigabytes_of, why_no_name
from ..text.sanitise import sanitise, sanitise_line
from ..text.units import count, rate, short, size
from ..tools.calls import Decision, edited_arguments
from ..tools.toolbox import Consent, ListedTool, Toolbox
from .actions import Action, no_action, refusal
from .controller import ChatController, RefusedError, Severity
from .preferences import chosen, sentences
from .session import Session
from .settings_form import (
    APP_FIELDS,
    MEMORY_FIELDS,
    NOT_SET,
    SPEED_FIELDS,
    THE_MODEL,
    THIS_CHAT,
    Field,
    Form,
    Sheet,
    summary,
    whole_number,
)
from .steps import AskConsent, EnginePhase, Step


def full_name(chat: ChatController, written: str) -> str:
    """Return the model that was written, and tell what a short name stands for. Raises ModelNotFoundError."""
    if not is_short(written):
        return written
    from ..models.local import resolve

    model = resolve(written)
    if model != written:
        chat.view.tell(f"{sanitise_line(written)} is {sanitise_line(model)}.")
    return model


RELOADING, RELOADING_WITHOUT = "The model is reloading with it.", "The model is reloading without one."


def adapter(chat: ChatController, written: str) -> None:
    """Load the model with another adapter, or without one, and keep that for this model; or say which it has."""
    load = chat.session.engine.load
    if not written:
        none = "This model has no adapter. /adapter adds one: a folder or a Hugging Face ID."
        chat.view.show(none if load.adapter is None else sanitise_line(load.adapter))
        return
    wanted = given_adapter(written) or None
    chat.chosen.adapter = load.model, wanted
    chat.view.tell(RELOADING if wanted else RELOADING_WITHOUT)
    chat.load(replace(load, adapter=wanted))


def serve(chat: ChatController, written: str) -> None:
    """Start a server on the chat's engine, or say how it is, or stop it."""
    if chat.bridge.server_url:
        raise RefusedError(f"This chat already uses the server at {chat.bridge.server_url}.")
    if chat.private:
        raise RefusedError("This chat is private: no other program may use its engine.")
    if written == "stop":
        if not chat.server.job.on:
            raise RefusedError("There is no server. /serve starts one.")
        chat.server.stop()
        return
    if chat.server.job.on:
        chat.view.show(f"{chat.server.job.line}. /serve stop stops it.")
        return
    port = whole_number(written) if written else processes.PORT
    if port is None or not 1 <= port <= 65535:
        raise RefusedError("Write /serve and a port, 1 to 65535, or /serve stop.")
    if any(find_spec(name) is None for name in processes.NEEDS):
        raise RefusedError(
            f"The server needs starlette, uvicorn and prometheus-client. Install them: {pip_install('tokamac[serve]')}."
        )
    if chat.session.engine.phase is EnginePhase.UNLOADED:  # there is no process to serve
        chat.perform(chat.session.start())
    chat.bridge.share(chat_socket())
    chat.server.begin(port)


def draft(chat: ChatController, written: str) -> None:
    """Load the model with another draft model, or without one, and keep that for this model; or say which it has."""
    load = chat.session.engine.load
    if not written:
        chat.view.show(no_draft(load.model) if load.draft is None else sanitise_line(load.draft))
        return
    wanted = given_draft(written) or None
    if wanted is not None and not load.speculation:
        raise RefusedError("Guessing ahead is off. Turn it on under /settings, then add a draft model.")
    chat.chosen.draft = load.model, wanted
    chat.view.tell(RELOADING if wanted else RELOADING_WITHOUT)
    chat.load(replace(load, draft=wanted))


def no_draft(model: str) -> str:
    """Return that a model has no draft model, and which would fit."""
    from tokamac.engine.perf.catalogue import draft_for

    none = "This model has no draft model."
    if (known := draft_for(model)) is None:
        return f"{none} /draft adds one, a folder or a Hugging Face ID; none is known for it."
    more = "" if known.published_bytes is None else f" ({size(known.published_bytes)})"
    return f"{none} {known.id}{more} has the same tokenizer: /draft {known.id} adds it. What if predicts its gain, under Guesses."


def pull(chat: ChatController, model: str) -> None:
    """Download a model; it is not loaded."""
    model = full_name(chat, model)
    if not is_id(model):
        raise RefusedError("Write /pull and a Hugging Face ID: /pull org/name.")
    if must_be_downloaded(model, hub_cache()):
        chat.view.open("pull", model)
    else:
        chat.view.tell(f"{sanitise_line(model)} is already on this disk. /model {sanitise_line(model)} loads it.")


def system_prompt(chat: ChatController, text: str) -> None:
    """Give this chat a system prompt, or say it."""
    if not text:
        chat.view.open("system_prompt")
        return
    chat.apply_choice(chat.preferences.choose_system("" if text.lower() == NONE else text, own=True))
    chat.view.tell("The system prompt applies to this chat from the next message on. /system none removes it.")


def remember(chat: ChatController, text: str) -> None:
    """Add a fact to the profile's memory, or show or edit the file."""
    preferences = chat.preferences
    home, profile = preferences.home, preferences.profile
    known = "".join(part.text for part in system_files.memory(home, profile))
    if not text:
        file = sanitise_line(str(system_files.memory_file(home, profile)))
        chat.view.show(
            f"{file}\n\n{sanitise(known)}" if known else f"Nothing is remembered yet. /remember TEXT writes {file}."
        )
        return
    if text == "edit":
        text = chat.view.edited(known)
        if text.strip() == known:
            raise RefusedError("The memory is unchanged.")
        system_files.write_memory(home, profile, text)
    else:
        system_files.remember(home, profile, text)
    chat.apply_choice(preferences.read_files())
    whose = f"the profile {sanitise_line(profile)}" if profile else "chats without a profile"
    chat.perform(chat.session.tell_price(f"The memory of {whose} is changed"))


def project(chat: ChatController, written: str) -> None:
    """Make the file that tells of this folder part of the system prompt, or leave it out."""
    preferences = chat.preferences
    now = preferences.own.project
    match written.lower():
        case "":
            chat.view.show(
                "No project file. /project on takes AGENTS.md or README.md of this folder."
                if now is None
                else f"Part of the system prompt: {sanitise_line(now)}. /project off leaves it out."
            )
        case "on":
            file = system_files.project_file(working_folder())
            system_files.project(str(file))  # or it says what is wrong
            chat.apply_choice(preferences.choose_project(str(file)))
            chat.perform(chat.session.tell_price(f"{file.name} is part of this chat's system prompt, and of new ones'"))
        case "off":
            chat.apply_choice(preferences.choose_project(None))
            chat.perform(chat.session.tell_price("No project file is part of the system prompt"))
        case _:
            raise RefusedError("Write /project on or /project off.")


def thinking(chat: ChatController, text: str) -> None:
    """Say what the chat template is told in this chat, or change it from the next message on."""
    session = chat.session
    if not text:
        chat.view.show(sentences(session.template, session.engine.info))
        return
    template = chosen(text, session.template, session.engine.info)
    chat.apply_choice(chat.preferences.choose_template(template, own=True))
    chat.view.tell(f"{sentences(template, None)} This applies to this chat, from the next message on.")


def pace(chat: ChatController, written: str) -> None:
    """Change how much of the time the model may work, or say it."""
    if written:
        settings(chat, f"pace {written.rstrip(' %')}")
    load, last = chat.session.engine.load, chat.session.progress.metrics
    now = f"The model may work {load.pace} % of the time"
    now += "" if load.pace_on_battery is None else f", on battery {load.pace_on_battery} %"
    full = None if last is None else last.expected_tps
    rests = full is not None and load.pace < FULL_PACE
    price = f": about {rate(full * load.pace / FULL_PACE)} of {rate(full)}" if rests and full else ""
    chat.view.show(f"{now}{price}. /pace N changes it; it rests between steps.")


def current_sheet(chat: ChatController) -> Sheet:
    """Return the settings of the open chat, the model and the app as the form has them."""
    session, preferences = chat.session, chat.preferences
    limit = gigabytes_of(session.engine.load.memory)
    values = replace(
        preferences.settings,
        unload_after_min=session.idle.after_min,
        memory_gb=limit,
        parallel=session.engine.load.parallel,
        speculation=session.engine.load.speculation,
        cpu_exact=session.engine.load.cpu_exact,
        pace=session.engine.load.pace,
        pace_on_battery=session.engine.load.pace_on_battery,
    )
    own = preferences.own.sampling is not None or preferences.own.template is not None
    return Sheet(session.template, session.sampling, session.engine.load.kv, values, own)


def apply_sheet(chat: ChatController, sheet: Sheet) -> bool:
    """Apply and keep what was changed in the form; return whether the model is loaded again for it.

    How keys and values are kept goes to the settings once a model has loaded with it. A flag's memory limit is for one run.
    """
    before, session, preferences = current_sheet(chat), chat.session, chat.preferences
    known, engine = preferences.settings, session.engine
    names = [field.name for field in (*MEMORY_FIELDS, *SPEED_FIELDS, *APP_FIELDS)]
    changed = {name: getattr(sheet.settings, name) for name in names}
    changed = {name: value for name, value in changed.items() if value != getattr(before.settings, name)}
    holds = sheet.kv == engine.load.kv and engine.info is not None and not preferences.names_kv(preferences.profile)
    chat.save_settings(replace(known, **changed, kv=sheet.kv if holds else known.kv))
    session.idle.after_min = sheet.settings.unload_after_min
    session.tints_guesses = sheet.settings.tint_guesses
    if _is_chosen(sheet, before, sheet.template != before.template, preferences.own.template):
        chat.apply_choice(preferences.choose_template(sheet.template, own=sheet.own))
    if _is_chosen(sheet, before, sheet.sampling != before.sampling, preferences.own.sampling):
        chat.apply_choice(preferences.choose_sampling(sheet.sampling, own=sheet.own))
    if (sheet.settings.pace, sheet.settings.pace_on_battery) != (engine.load.pace, engine.load.pace_on_battery):
        chat.perform(engine.pace(sheet.settings.pace, sheet.settings.pace_on_battery))
        if chat.bridge.server_url:
            chat.view.tell("The server that this chat uses keeps its own pace: tokamac serve --pace N.")
    load = replace(
        engine.load,
        kv=sheet.kv,
        memory=sheet.settings.memory_bytes,
        parallel=sheet.settings.parallel,
        speculation=sheet.settings.speculation,
        cpu_exact=sheet.settings.cpu_exact,
        wired=sheet.settings.wired,
    )
    if load == engine.load:
        return False
    chat.chosen.kv = sheet.kv
    chat.load(load)
    return True


AT_ONCE = ("unload_after_min", "pace", "pace_on_battery")  # settings of a model that load nothing again
EVERYWHERE = "everywhere"  # before a setting: change it for every chat, not for this one alone


def settings(chat: ChatController, written: str) -> None:
    """Change the setting that is written before its value; without one, say all of them."""
    if not written:
        chat.view.open("settings")
        return
    form, before = Form(chat.session.engine.info), current_sheet(chat)
    words = [each for each in written.replace("=", " ", 1).split(maxsplit=3) if each != "parameter"]  # as Ollama has it
    if everywhere := words[:1] == [EVERYWHERE]:
        known = chat.preferences.settings
        before = replace(before, template=known.template, sampling=known.sampling)
    texts = form.texts(before)
    name, value = ([*words[everywhere:], "", ""])[0].lower().replace("-", "_"), " ".join(words[everywhere + 1 :])
    if not name:
        chat.view.show(listed_settings(form, texts))
        return
    if name not in texts:
        near = nearest(name, texts)
        raise RefusedError(
            f"There is no setting {sanitise_line(name):.40}. "
            + (f"Did you mean {near}?" if near else "/settings lists them.")
        )
    group, field = next((group, each) for group in form.groups for each in group.fields if each.name == name)
    if not value:
        chat.view.show(_setting_line(field, texts, form))
        return
    own = not everywhere if group.scope == THIS_CHAT else before.own
    sheet = form.read({**texts, name: form.defaults[name] if value.lower() == USUAL else value}, own=own)
    was, now = texts[name] or NOT_SET, form.texts(sheet)[name] or NOT_SET
    where = "" if group.scope != THIS_CHAT else " in this chat" if own else " in every chat without settings of its own"
    reloads = f" {RELOADING}" if group.scope == THE_MODEL and name not in AT_ONCE and was != now else ""
    chat.view.tell(f"{name} is {now}{where}{'' if was == now else f'; it was {was}'}.{reloads}")
    if was != now or own != before.own:
        apply_sheet(chat, sheet)
        chat.view.draw()


def changed_settings(chat: ChatController, sheet: Sheet) -> str:
    """Return what differs between the settings and those of ``sheet``: ``temperature 0.3, key_bits 8``."""
    form, before = Form(chat.session.engine.info), current_sheet(chat)
    texts = form.texts(before)
    changed = [
        f"{name} {sanitise_line(text) or NOT_SET}" for name, text in form.texts(sheet).items() if text != texts[name]
    ]
    changed += [] if sheet.own == before.own else ["for this chat only" if sheet.own else "for every chat"]
    return ", ".join(changed)


def listed_settings(form: Form, texts: Mapping[str, str]) -> str:
    """Return all settings in lines, under for whom they hold."""
    lines: list[str] = []
    for scope, groups in groupby(form.groups, key=lambda group: group.scope):
        lines += [f"{scope}:", *(_setting_line(field, texts, form) for group in groups for field in group.fields)]
    return "\n".join([*lines, "/set NAME VALUE changes one; default as the value resets it."])


def _setting_line(field: Field, texts: Mapping[str, str], form: Form) -> str:
    text, usual = texts[field.name], form.defaults[field.name]
    differs = "" if text == usual else f"; default {usual or NOT_SET}"
    return f"{field.name}: {sanitise_line(text) or NOT_SET} ({field.note}{differs})"


SHOWN = {"info": "model", "parameters": "settings"}  # ollama's names for parts of /show


def show(chat: ChatController, wanted: str) -> None:
    """Say which model this is, with which settings, template options and system prompt; or one of these."""
    session, form = chat.session, Form(chat.session.engine.info)
    texts = form.texts(current_sheet(chat))
    differ = [f"{name} {sanitise_line(text)}" for name, text in texts.items() if text != form.defaults[name]]
    parts = {
        "model": _model_lines(session),
        "settings": f"Settings that differ: {', '.join(differ)}." if differ else "All settings have their defaults.",
        "template": sentences(session.template, session.engine.info),
        "system": f"System prompt: {sanitise(session.system_text)}" if session.system_text else "No system prompt.",
    }
    wanted = SHOWN.get(wanted, wanted)
    if wanted and wanted not in parts:
        raise RefusedError(f"/show takes {', '.join(parts)}, or nothing.")
    chat.view.show(parts[wanted] if wanted else "\n".join(parts.values()))


def _model_lines(session: Session) -> str:
    info = session.engine.info
    if info is None:
        return f"Model: {sanitise_line(session.engine.load.model)}; it is not loaded."
    facts = [
        info.architecture,
        f"{short(info.parameters)} parameters",
        "" if info.bits_per_weight is None else f"{info.bits_per_weight:.3g} bits a weight",
        size(info.weight_bytes),
        "" if info.context_length is None else f"context {count(info.context_length)} tokens",
    ]
    return sanitise(
        "\n".join([f"Model: {info.name}", *filter(None, [" · ".join(filter(None, facts)), str(info.path)])])
    )


def _is_chosen(sheet: Sheet, before: Sheet, changed: bool, own: object) -> bool:
    """Whether a part of the sheet is to be kept: it has ``changed``, or is the chat's own (``own``) from now on, or no more."""
    return changed or (not before.own if sheet.own else own is not None)


PROFILE_HOW = "/profile save NAME keeps the model, settings and system prompt of this chat."


def profile(chat: ChatController, text: str) -> None:
    """List the profiles, apply one to this chat, or keep this chat's setup as one."""
    verb, _, name = text.partition(" ")
    match verb.lower():
        case "":
            chat.view.open("profile")
        case "save":
            chat.view.tell(save_profile(chat, name.strip()))
        case "delete":
            chat.view.tell(delete_profile(chat, name.strip()))
        case _:
            use_profile(chat, "" if text.lower() == NO_PROFILE else text)


def listed_profiles(chat: ChatController) -> str:
    """Return the profiles in lines, the open chat's marked."""
    known, now = chat.preferences.profiles(), chat.preferences.profile
    lines = [f"{'*' if name == now else ' '} {sanitise_line(name)}: {summary(each)}" for name, each in known.items()]
    applies = "/profile NAME applies one, /profile none removes it."
    return "\n".join([*lines, f"{applies} {PROFILE_HOW}"] if lines else [f"There are no profiles yet. {PROFILE_HOW}"])


def known_profile(chat: ChatController, name: str) -> Profile:
    """Return the profile of this name. Raises RefusedError."""
    known = chat.preferences.profiles()
    if name in known:
        return known[name]
    if not known:
        raise RefusedError(f"There are no profiles yet. {PROFILE_HOW}")
    near = nearest(name, known)
    meant = f"did you mean {sanitise_line(near)}" if near is not None else f"there are: {', '.join(known)}"
    raise RefusedError(f"There is no profile {sanitise_line(name):.40}; {sanitise_line(meant)}.")


def use_profile(chat: ChatController, name: str) -> None:
    """Apply a profile to the open chat, and load its model; "" is none: this chat has the settings of every chat again."""
    preferences, session = chat.preferences, chat.session
    wanted = known_profile(chat, name) if name else Profile()
    load = session.engine.load
    if wanted.model is not None:
        require(wanted.model, name)
        model = lasting(wanted.model)
        load = load.for_model(model, *preferences.settings.beside(model))
    if preferences.names_kv(name) or preferences.names_kv(preferences.profile):
        load = replace(load, kv=preferences.kv(name))
    chat.apply_choice(preferences.choose_profile(name))
    shown = sanitise_line(name)
    said = f"Profile {shown} applies to this chat from the next message on, and to new chats." if name else PROFILE_OFF
    if load != session.engine.load:
        chat.view.tell(f"{said} Loading {sanitise_line(load.model)}.")
        chat.chosen.model = load.model
        chat.load(load)
    else:
        chat.view.tell(said)
        chat.view.draw()


PROFILE_OFF = "No profile: this chat and new ones use the general settings."


def save_profile(chat: ChatController, name: str, *, again: bool = False) -> str:
    """Keep the model, settings and system prompt of the open chat as a profile, which the chat has from here on; say so.

    again: in place of one that the chat does not have. Raises RefusedError.
    """
    preferences, session = chat.preferences, chat.session
    if why := why_no_name(name):
        raise RefusedError(f"{why} Write /profile save coding, for example.")
    known, shown = preferences.profiles(), sanitise_line(name)
    if name in known and preferences.profile != name and not again:
        raise RefusedError(f"The profile {shown} already exists. /profile delete {shown} removes it.")
    everywhere = preferences.settings
    options = {
        **differing(session.sampling, everywhere.sampling),
        **differing(session.template, everywhere.template),
        **differing(session.engine.load.kv, everywhere.kv),
    }
    system = session.system if session.system or everywhere.system else None
    made = Profile(session.engine.load.model, system, preferences.tools or None, options)
    problems = [preferences.keep_profile(name, made), preferences.choose_profile(name)]
    chat.apply_choice(" ".join(filter(None, problems)))
    chat.view.draw()
    return f"{'Changed' if name in known else 'Saved'} the profile {shown}: {summary(made)}."


def delete_profile(chat: ChatController, name: str) -> str:
    """Delete a profile, and say so; chats keep what they have of it."""
    known_profile(chat, name)
    problem = chat.preferences.keep_profile(name, None)
    chat.preferences.give(chat.session)
    chat.view.draw()
    return problem or f"Deleted the profile {sanitise_line(name)}. Chats keep its settings."


CONSENTS: Mapping[Consent, str] = {"asks": "asks", "chat": "allowed in this chat", "always": "always allowed"}


def tools(chat: ChatController, text: str) -> None:
    """List the tools, turn some on or off in this chat, or have their calls ask again."""
    switch, *names = text.replace(",", " ").split() or [""]
    match switch:
        case "":
            chat.view.open("tools")
        case "ask":
            known = {each.name for each in listed_tools(chat)}
            if unknown := next((name for name in names if name not in known), ""):
                raise RefusedError(f"There is no tool {sanitise_line(unknown):.60}. /tools lists them.")
            chat.view.tell(ask_again(chat, names or known))
        case "on" | "off":
            chat.view.tell(*switch_tools(chat, names, on=switch == "on"))
        case _:
            chat.view.tell(*switch_tools(chat, [switch, *names], on=None))


TOOLS_HINT = (
    "/tools on NAME turns one on in this chat, /tools off NAME off; after /tools ask NAME its calls ask again. "
    "tokamac help tools explains."
)


def _toolbox(chat: ChatController) -> Toolbox:
    if chat.preferences.toolbox is None:
        raise RefusedError("No tools are available here.")
    if problem := chat.preferences.look_again():  # a server may have been added meanwhile
        chat.view.tell(problem, "warning")
    return chat.preferences.toolbox


def listed_tools(chat: ChatController) -> list[ListedTool]:
    """Return all tools and MCP servers, with what holds for them in the open chat. Raises RefusedError."""
    allowed = chat.session.conversation.allowed
    return _toolbox(chat).listed(chat.preferences.tools, allowed, chat.preferences.settings.tools.allowed)


def tool_line(tool: ListedTool) -> str:
    what = "MCP server, " if tool.server else ""
    asks = "" if tool.consent == "asks" else f" ({CONSENTS[tool.consent]})"
    lead = " " * 5 if tool.of_server else f"{'on ' if tool.on else 'off'}  "
    return f"{lead}{sanitise_line(tool.name):<13} {what}{sanitise_line(tool.about)}{asks}"


def switch_tools(chat: ChatController, names: Sequence[str], *, on: bool | None) -> tuple[str, Severity]:
    """Turn tools and servers on or off in the open chat, None: each the other way; return what is on now, in a sentence.

    No names: all that are built in, or off, all. Raises TokamacError.
    """
    preferences, info, box = chat.preferences, chat.session.engine.info, _toolbox(chat)
    named = box.check(names or (box.reading if on else box.names))
    now = [name for name in preferences.tools if name not in named or on]
    now += [name for name in named if name not in preferences.tools and on is not False]
    box.retry(named)
    preferences.choose_tools(now)
    chat.apply_choice("")
    chat.view.draw()
    if now and info is not None and not info.takes_tools:
        return f"Tools are on, but {sanitise_line(info.name)} can't call any. Another model may.", "warning"
    asks = not set(now) <= set(chat.preferences.settings.tools.allowed)
    on_now = f"Tools on in this chat: {', '.join(now)}.{' Calls ask you first.' if asks else ''}"
    return (on_now if now else "All tools are off."), "information"


def ask_again(chat: ChatController, names: Collection[str]) -> str:
    """Take back what the user allowed these tools, for the open chat and for good; return a sentence."""
    for name in names:
        chat.session.ask_again(name)
        if name in chat.preferences.settings.tools.allowed and (
            problem := chat.preferences.allow_tool(name, always=False)
        ):
            chat.view.tell(problem, "warning")
    which = sanitise_line(next(iter(names))) if len(names) == 1 else "all of these tools"
    return f"Every call of {which} asks you again."


def decide(chat: ChatController, call: ToolCall, decision: Decision) -> None:
    """Take the user's answer to a call that asks; one for good goes to the settings."""
    if decision == "edit":
        chat.perform(edited_call(chat, call))
        return
    if decision == "always" and (problem := chat.preferences.allow_tool(call.name, always=True)):
        chat.view.tell(problem, "warning")
    chat.perform(chat.session.consent(call.id, decision))


def edited_call(chat: ChatController, call: ToolCall) -> list[Step]:
    """Let the user edit what a call would write or run, and ask again."""
    preview = chat.preferences.preview(call)
    if preview is None:
        return [AskConsent(call)]
    try:
        text = chat.view.edited(sanitise(str(call.values[preview.edits])))
    except RefusedError as error:
        chat.view.tell(error.one_line(), "warning")
        return [AskConsent(call)]
    return chat.session.revise_call(call.id, edited_arguments(call, preview.edits, text))


# Keys ---------------------------------------------------------------------------------------------------------------------


def keys(chat: ChatController, written: str) -> None:
    """List the keys of the full screen, or change those of one action: ``explain f8, alt+e``, ``explain default``."""
    name, _, wanted = written.partition(" ")
    known = {action.id: action for action in chat.preferences.keymap.actions}
    if not name:
        chat.view.open("keys")
    elif name not in known:
        raise RefusedError(f"{sanitise_line(name)}: {no_action(name)}.")
    elif not wanted:
        chat.view.show(f"{keys_line(known[name])}. /keys {name} f8 gives it that key; /keys {name} default resets it.")
    else:
        chosen = () if wanted == NONE else tuple(key.strip().lower() for key in wanted.split(","))
        chat.view.tell(choose_keys(chat, name, None if wanted == USUAL else chosen))


USUAL, NONE = "default", "none"  # instead of a key: those of the registry, or none


def choose_keys(chat: ChatController, action: str, keys: tuple[str, ...] | None) -> str:
    """Give an action these keys, or its usual ones (None), from now on; return what it has, or what of it could not be written.

    Raises RefusedError where it can't have them.
    """
    if keys is not None and (why := refusal(action, keys, chat.preferences.settings.keys)):
        raise RefusedError(f"{action} keeps its keys: {sanitise_line(why)}.")
    problem = chat.preferences.choose_keys(action, keys)
    chat.rekey()
    now = next(each for each in chat.preferences.keymap.actions if each.id == action)
    return problem or f"{keys_line(now)}."


def keys_line(action: Action) -> str:
    """Return an action's id, label and keys: ``explain (Explain): F2, Ctrl+X E``."""
    held = action.key_names if action.keys else f"no key{f'; {action.usage}' if action.slash else ''}"
    return f"{action.id} ({action.label}): {held}"
