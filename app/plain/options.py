"""Plain commands about the model and its settings: read out, and changed."""

from dataclasses import replace

from tokamac.app.plain.repl import Repl
from tokamac.app.settings import Settings
from tokamac.app.tui.digits import whole_number
from tokamac.app.tui.models import lasting
from tokamac.app.tui.options import KV_FIELDS, SAMPLING_FIELDS, Field, FieldError, read_kv, read_sampling, write
from tokamac.engine.options import KVSpec, Sampling

NONE = "none"
"""Takes the system prompt away."""
UNLOAD = "unload_after_min"
NAMES = (*(field.name for field in (*SAMPLING_FIELDS, *KV_FIELDS)), UNLOAD)
"""Of what /settings changes."""
UNLOAD_NOTE = "minutes without use until the model gives its memory back; 0: never"


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
    driver.perform(session.choose(replace(session.load, model=name)))
    driver.settle(loaded=True)
    if session.info is not None and session.load.model == name:
        _tell(
            repl, driver.memory.keep(replace(driver.memory.settings, model=name)) or f"{session.info.name} is loaded."
        )


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
    name, _, value = written.partition(" ")
    if not name:
        notes = {field.name: field.note for field in (*SAMPLING_FIELDS, *KV_FIELDS)}
        lines = [f"{each}: {text or 'not set'} ({notes[each]})" for each, text in {**sampling, **kv}.items()]
        repl.console.say("\n".join([*lines, f"{UNLOAD}: {session.idle.after_min} ({UNLOAD_NOTE})"]))
        return
    try:
        if name in sampling:
            _choose_sampling(repl, read_sampling({**sampling, name: value}))
        elif name in kv:
            _choose_kv(repl, name, read_kv({**kv, name: value}))
        elif name == UNLOAD:
            _choose_minutes(repl, value.strip())
        else:
            _tell(repl, f"There is no setting {name}. /settings lists them.")
    except FieldError as error:
        _tell(repl, str(error))


def _choose_sampling(repl: Repl, sampling: Sampling) -> None:
    memory = repl.driver.memory
    said = memory.choose_sampling(sampling, own=False)
    memory.give(repl.driver.session)
    own = "It holds in every chat but those with settings of their own."
    _tell(repl, said or own)


def _choose_minutes(repl: Repl, written: str) -> None:
    minutes, session = whole_number(written), repl.driver.session
    if minutes is None:
        raise FieldError(UNLOAD, f"{UNLOAD}: {written or 'nothing'!r:.40} is no number of minutes (0: never).")
    same, session.idle.after_min = minutes == session.idle.after_min, minutes
    _tell(repl, f"It is {minutes} already." if same else f"{UNLOAD} is {minutes} now.")
    _keep(repl, replace(repl.driver.memory.settings, unload_after_min=minutes))


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


def _texts(fields: tuple[Field, ...], options: Sampling | KVSpec) -> dict[str, str]:
    return {field.name: write(field, options) for field in fields}


def _keep(repl: Repl, settings: Settings) -> None:
    if problem := repl.driver.memory.keep(settings):
        _tell(repl, problem)


def _tell(repl: Repl, text: str) -> None:
    repl.console.note(text)
