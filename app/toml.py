"""Write TOML as a person would: tomllib reads it, and nothing in the standard library writes it."""

import datetime
import re
from typing import Any


def toml(table: dict[str, Any], prefix: str = "") -> str:
    """Return a table as TOML: plain values first, then sub-tables, whose names begin with ``prefix``."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict) and value:
            name = f"{prefix}{_key(key)}"
            lines.append(f"\n[{name}]\n{toml(value, f'{name}.')}".rstrip())
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "a").replace("-", "a").isalnum() else f'"{_escaped(key)}"'


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return repr(value)


def _string(text: str) -> str:
    """Return a text as TOML; one of several lines as a person would write it. The newline after the quotes is not part of it."""
    if "\n" not in text:
        return f'"{_escaped(text)}"'
    lines = "\n".join(_escaped(line) for line in text.split("\n"))
    return f'"""\n{lines}"""'


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda char: _ESCAPES.get(char[0]) or f"\\u{ord(char[0]):04x}", text)


_SPECIAL = re.compile(r'["\\\x00-\x1f\x7f]')
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
