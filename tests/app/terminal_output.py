"""What Textual may write to a terminal, and a check that a stream holds nothing else."""

import re
from collections.abc import Callable

OWN = re.compile(
    r"\x1b\[[0-9;]*m"  # colours and styles of a row
    r"|\x1b\[[0-9]+;[0-9]+H|\x1b\[H"  # places
    r"|\x1b\[\?(?:25|1000|1003|1004|1006|1015|1016|1049|2004|2026|2048)[hl]"  # cursor, mouse, focus, screen, pastes, syncing, sizes
    r"|\x1b\[\?(?:2026|2048)\$p|\x1b\[\?7[hl]|\x1b\[>[0-9]+u|\x1b\[<u"  # questions, wrapping, the keyboard
    r"|\x1b\]22;[a-z-]*\x07"  # the mouse pointer's shape
    # Ours: the terminal's title is remembered, named after the chat, and given back.
    r"|\x1b\[22;2t|\x1b\]2;\x07\x1b\[23;2t"
    r"|\x1b\]2;(?:[^\x00-\x1f\x7f-\x9f]{1,40} · )?tokamac\x07"
)
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
ALL_CONTROLS = [chr(code) for code in (*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), *range(0x7F, 0xA0))]
BIDI = [chr(code) for code in (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))]


def foreign(stream: str) -> list[str]:
    """Return the controls in ``stream`` that Textual has not made, each with what stands around it."""
    rest = OWN.sub("", stream)
    return [ascii(rest[max(0, at.start() - 20) : at.start() + 20]) for at in CONTROL.finditer(rest)]


def recorder(monkeypatch: object) -> Callable[[], str]:
    """Have an app that runs without a terminal write as to one; return what it wrote so far."""
    from textual.drivers.headless_driver import HeadlessDriver

    written: list[str] = []
    patch = monkeypatch.setattr  # type: ignore[attr-defined]
    patch(HeadlessDriver, "is_headless", property(lambda _: False))
    patch(HeadlessDriver, "write", lambda _, data: written.append(data))
    return lambda: "".join(written)
