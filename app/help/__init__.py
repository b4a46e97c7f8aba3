"""``tokamac help TOPIC``: one text file per topic in this folder."""

# The first line is the summary. Placeholders for the chat's actions and settings' options are filled on reading.

from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH = 80
# Words under which somebody may look for a topic.
OTHER_NAMES = {
    "bindings": "keys",
    "config": "settings",
    "env": "environment",
    "exit-codes": "exit",
    "hostfile": "nodes",
    "lora": "adapters",
    "persona": "profiles",
    "pipes": "json",
    "preset": "profiles",
    "profile": "profiles",
    "quantize": "convert",
    "shortcuts": "keys",
    "status": "exit",
    "window": "kv",
}


def topics() -> dict[str, str]:
    files = sorted(FOLDER.glob("*.txt"))
    return {file.stem: file.read_text(encoding="utf-8").partition("\n")[0] for file in files}


def topic(name: str) -> str:
    """Raises KeyError."""
    file = FOLDER / f"{name}.txt"
    if not file.is_file():
        raise KeyError(name)
    text = file.read_text(encoding="utf-8").rstrip("\n")
    for placeholder, value in _VALUES.items():
        if f"{{{placeholder}}}" in text:
            text = text.replace(f"{{{placeholder}}}", value())
    return f"{name}: {text}"


def nearest_topic(word: str, names: list[str]) -> str | None:
    from tokamac.engine.hub.names import nearest

    return OTHER_NAMES.get(word.lower()) or nearest(word, names)


def _actions() -> str:
    from ..chat.actions import ACTIONS

    lines = []
    for action in ACTIONS:
        lead = action.key_names if action.keys else action.usage
        lead = f"{lead:<14}" if len(lead) < 14 else f"{lead}\n{'':14}"
        command = f" ({action.usage})".replace(" ", "\u00a0")[1:] if action.keys and action.slash else ""
        lines.append(_wrapped(f"{lead}{action.help} {command}", 14).replace("\u00a0", " "))
    return "\n".join(lines)


def _ids() -> str:
    from ..chat.actions import ACTIONS

    return _wrapped("Ids: " + ", ".join(action.id for action in ACTIONS if action.bound), 0).removeprefix("Ids: ")


def _options(name: str, first: str) -> Callable[[], str]:
    """Return a function that lists a table's options except the first, which the text has."""

    def listed() -> str:
        from dataclasses import fields

        from ..settings import Settings

        names = [field.name for field in fields(getattr(Settings(), name)) if field.name not in (first, "tools")]
        return _wrapped(f"{'':26}# also {', '.join(names)}", 26, "# ").lstrip()

    return listed


def _wrapped(text: str, indent: int, mark: str = "") -> str:
    import textwrap  # ``tokamac --help`` needs the summaries alone

    lines = [
        textwrap.fill(line, WIDTH - 1, subsequent_indent=" " * indent + mark, break_on_hyphens=False)
        for line in text.split("\n")
    ]
    return "\n".join(lines)


_VALUES: dict[str, Callable[[], str]] = {
    "actions": _actions,
    "ids": _ids,
    "sampling": _options("sampling", "temperature"),
    "template": _options("template", "thinking"),
    "kv": _options("kv", "key_bits"),
}
