"""What goes with a prompt: texts of files, and pasted ones. Pure; ``attach`` reads the files.

To the model they stand before the user's words, each in a block of its own that it can't end itself:

    File notes.md:
    ```
    what the file says
    ```

    the user's words
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from tokamac.app.fence import fence_for
from tokamac.app.sanitise import sanitise, sanitise_line
from tokamac.app.store.values import Attachment

LONG_PASTE_CHARACTERS = 2_000
LONG_PASTE_LINES = 30
"""A paste beyond either would bury what is written around it."""

_PASTE = "paste"
_PASTED = "pasted text"
_KINDS = {
    "markdown": frozenset({".md", ".markdown"}),
    "csv": frozenset({".csv", ".tsv"}),
    "pdf": frozenset({".pdf"}),
    "text": frozenset({"", ".txt", ".text", ".log", ".rst"}),
}
_BLOCK = re.compile(
    r"(?:File (?P<file>[^\n]+)|Pasted text (?P<number>[0-9]+)):\n(?P<fence>`{3,})\n(?P<text>(?s:.*?))\n(?P=fence)(?:\n\n|\Z)"
)
_NUMBER = re.compile(rf"{_PASTED} ([0-9]+)")


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt that is not sent: the user's words, and what goes with them."""

    text: str = ""
    attachments: tuple[Attachment, ...] = ()

    @property
    def whole(self) -> str:
        """All of it, as the model is given it."""
        return whole(self.text, self.attachments)


def whole(words: str, attachments: Iterable[Attachment]) -> str:
    """Return the message that ``words`` and ``attachments`` make."""
    blocks = [_block(attachment) for attachment in attachments]
    return "\n\n".join([*blocks, words] if words else blocks)


def apart(message: str) -> Draft:
    """Return what ``whole`` made ``message`` of. A text that only looks as if it began with a file is taken for one, too."""
    found: list[Attachment] = []
    at = 0
    while block := _BLOCK.match(message, at):
        at = block.end()
        name = block["file"]
        kind = _PASTE if name is None else kind_of(name)
        found.append(Attachment(name or f"{_PASTED} {block['number']}", block["text"], kind))
    return Draft(message[at:], tuple(found))


def joined(drafts: Sequence[Draft]) -> Draft:
    """Return several drafts as one, in their order."""
    words = "\n\n".join(draft.text for draft in drafts if draft.text)
    return Draft(words, tuple(attachment for draft in drafts for attachment in draft.attachments))


def attachment(name: str, text: str) -> Attachment:
    """Return the file ``name`` with this text as an attachment, both made safe to show."""
    shown = sanitise_line(name)
    return Attachment(shown, sanitise(text).strip("\n"), kind_of(shown))


def is_long(text: str) -> bool:
    """Whether a pasted text is better shown by its name."""
    return len(text) > LONG_PASTE_CHARACTERS or text.count("\n") >= LONG_PASTE_LINES


def pasted(text: str, beside: Iterable[Attachment]) -> Attachment:
    """Return a pasted text, made safe, as an attachment ``beside`` those that are there."""
    numbers = [int(number[1]) for each in beside if (number := _NUMBER.fullmatch(each.name))]
    return Attachment(f"{_PASTED} {max(numbers, default=0) + 1}", sanitise(text).strip("\n"), _PASTE)


def kind_of(name: str) -> str:
    """Return what a file of this name is: ``markdown``, ``csv``, ``pdf``, ``text``, or else ``code``."""
    suffix = PurePath(name).suffix.lower()
    return next((kind for kind, suffixes in _KINDS.items() if suffix in suffixes), "code")


def _block(attachment: Attachment) -> str:
    """Return an attachment under its name, between fences with more backticks than it holds in a row."""
    fence = fence_for(attachment.text)
    is_paste = attachment.kind == _PASTE and _NUMBER.fullmatch(attachment.name)
    title = attachment.name.capitalize() if is_paste else f"File {sanitise_line(attachment.name)}"
    return f"{title}:\n{fence}\n{attachment.text}\n{fence}"
