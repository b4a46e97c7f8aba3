"""A first word that is no command: what was probably meant."""

from collections.abc import Iterable

from tokamac.engine.hub_names import GUIDE
from tokamac.engine.spelling import nearest

ELSEWHERE = {
    "config": "/settings in the chat",
    "download": "tokamac models pull",
    "generate": "tokamac ask",
    "list": "tokamac models list",
    "ls": "tokamac models list",
    "pull": "tokamac models pull",
    "quantize": "tokamac convert",
    "remove": "tokamac models remove",
    "rm": "tokamac models remove",
    "run": "tokamac chat",
    "settings": "/settings in the chat",
    "version": "tokamac --version",
}
"""What other programs call what this one has under another name."""


def no_command(word: str, commands: Iterable[str]) -> str:
    """Return, for one line, that ``word`` is no command, and which was probably meant."""
    meant = ELSEWHERE.get(word) or (f"tokamac chat {word}" if _is_model(word) else None)
    if meant is None and (near := nearest(word, commands)) is not None:
        meant = f"tokamac {near}"
    said = f"there is no command {word!r}"
    if meant is None:
        return f"{said}. See `tokamac --help`; to chat with a model: tokamac chat MODEL"
    return f"{said}; did you mean {meant}? See `tokamac --help`."


def _is_model(word: str) -> bool:
    return word == GUIDE or "/" in word
