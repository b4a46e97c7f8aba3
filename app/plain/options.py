"""Plain commands about the model and its settings: read out, and changed."""

from dataclasses import replace

from tokamac.app.options import given_adapter
from tokamac.app.plain.repl import Repl
from tokamac.app.settings import Settings, gigabytes_of, with_adapter
from tokamac.app.tui.models import lasting
from tokamac.app.tui.options import (
    KV_FIELDS,
    MEMORY_FIELDS,
    SAMPLING_FIELDS,
    TEMPLATE_FIELDS,
    Field,
    FieldError,
    read_kv,
    read_memory,
    read_sampling,
    read_template,
    write,
)
from tokamac.app.tui.thinking import chosen, sentences
from tokamac.engine.errors import OptionError
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions

NONE = "none"
"""Takes the system prompt away."""
NAMES = tuple(field.name for field in (*SAMPLING_FIELDS, *TEMPLATE_FIELDS, *KV_FIELDS, *MEMORY_FIELDS))
"""Of what /settings changes."""


def model(repl: Repl, name: str) -> None:
    """Load another model, or say which one is loaded. One that loads is the one to begin with from now on."""
    driver = repl.driver
    session = driver.session
    if not name:
        repl.console.say(session.load.model)
        return
    name = lasting(name)
    if not repl.console.typed:  # a script's line: the model before is loaded first, so that there is one to go back to
        driver.settle(loaded=True)
    driver.perform(session.choose(session.load.of(name, driver.memory.settings.adapters.get(name))))
    driver.settle(loaded=True)
    if session.info is not None and session.load.model == name:
        _tell(
            repl, driver.memory.keep(replace(driver.memory.settings, model=name)) or f"{session.info.name} is loaded."
        )


def adapter(repl: Repl, written: str) -> None:
    """Load the model with another adapter, or with none, and keep that for this model; or say which it has."""
    driver = repl.driver
    load, known = driver.session.load, driver.memory.settings
    if not written:
        repl.console.say(load.adapter or "This model has no adapter.")
        return
    chosen = given_adapter(written) or None
    _tell(repl, "The model loads again with it." if chosen else "The model loads again without one.")
    driver.perform(driver.session.choose(replace(load, adapter=chosen)))
    driver.settle(loaded=True)
    if driver.session.info is not None and driver.session.load.adapter == chosen:
        _keep(repl, replace(known, adapters=with_adapter(known, load.model, chosen)))


def system(repl: Repl, text: str) -> None:
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


def settings(repl: Repl, written: str) -> None:
    """Read out how tokens are chosen and how keys and values are kept, or change one of these."""
    session = repl.driver.session
    sampling, kv = _texts(SAMPLING_FIELDS, session.sampling), _texts(KV_FIELDS, session.load.kv)
    template = _texts(TEMPLATE_FIELDS, repl.driver.memory.settings.template)
    held = Settings(unload_after_min=session.idle.after_min, memory_gb=gigabytes_of(session.load.memory))
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


def _choose_sampling(repl: Repl, sampling: Sampling) -> None:
    memory = repl.driver.memory
    said = memory.choose_sampling(sampling, own=False)
    memory.give(repl.driver.session)
    own = "It holds in every chat but those with settings of their own."
    _tell(repl, said or own)


def thinking(repl: Repl, text: str) -> None:
    """Read out what the chat template is told in this chat, or tell it something else from the next message on."""
    driver = repl.driver
    if driver.session.info is None and not repl.console.typed:
        driver.settle(loaded=True)  # a script's line: the model says what it can be told
    session = driver.session
    if not text:
        repl.console.say(sentences(session.template, session.info))
        return
    template = chosen(text, session.template, session.info)
    driver.memory.choose_template(template, own=True)
    driver.memory.give(session)
    if driver.recording is not None:
        driver.recording.keep_own()
    _tell(repl, f"{sentences(template, None)} It holds in this chat from the next message on.")


def _choose_template(repl: Repl, template: TemplateOptions) -> None:
    memory = repl.driver.memory
    _keep(repl, replace(memory.settings, template=template))
    memory.give(repl.driver.session)
    _tell(repl, "It holds in every chat but those with their own; /thinking is for this chat alone.")


def _choose_memory(repl: Repl, name: str, chosen: Settings) -> None:
    """Change what the model may take, which loads it again, or when it is unloaded. name: the field that was named."""
    driver = repl.driver
    session, load = driver.session, replace(driver.session.load, memory=chosen.memory_bytes)
    same = load == session.load and chosen.unload_after_min == session.idle.after_min
    said = _texts(MEMORY_FIELDS, chosen)[name] or "not set"
    _tell(repl, f"It is {said} already." if same else f"{name} is {said} now.")
    session.idle.after_min = chosen.unload_after_min
    kept = driver.memory.settings
    if name == "memory_gb":
        kept = replace(kept, memory_gb=chosen.memory_gb)
    else:
        kept = replace(kept, unload_after_min=chosen.unload_after_min)
    _keep(repl, kept)
    if load != session.load:
        _tell(repl, "The model loads again with it.")
        driver.perform(session.choose(load))
        driver.settle(loaded=True)


def _choose_kv(repl: Repl, name: str, kv: KVSpec) -> None:
    """Change how keys and values are kept, which loads the model again; one that loads so is remembered.

    name: the field that was named.
    """
    driver = repl.driver
    load = driver.session.load
    if kv == load.kv:
        _tell(repl, f"It is {_texts(KV_FIELDS, kv)[name] or 'not set'} already.")
        return
    _tell(repl, "The model loads again with it.")
    driver.perform(driver.session.choose(replace(load, kv=kv)))
    driver.settle(loaded=True)
    if driver.session.info is not None and driver.session.load.kv == kv:
        _keep(repl, replace(driver.memory.settings, kv=kv))


def _texts(fields: tuple[Field, ...], options: object) -> dict[str, str]:
    return {field.name: write(field, options) for field in fields}


def _keep(repl: Repl, settings: Settings) -> None:
    if problem := repl.driver.memory.keep(settings):
        _tell(repl, problem)


def _tell(repl: Repl, text: str) -> None:
    repl.console.note(text)
