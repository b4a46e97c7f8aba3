"""The end of a growing text: what may still change, and what is settled.

Only the last top-level section of a Markdown text can change when text is added (a paragraph may become a heading or a table,
a list may go on); all before it is settled. So each look parses the open tail alone, however long the reply has become.
"""

from dataclasses import dataclass, replace

from tokamac.app.tui.prose.blocks import Block, Flow, Section
from tokamac.app.tui.prose.parse import parse

LONGEST_OPEN_LIST = 24
OPEN_ITEMS = 3


@dataclass(frozen=True, slots=True)
class Look:
    """The tail's blocks: the first ``settled`` of them are final."""

    blocks: tuple[Block, ...]
    settled: int


class Tail:
    """The unsettled end of a text that grows."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        """Append ``text``."""
        self._text += text

    def look(self) -> Look:
        """Return the blocks since the last look's settled ones, and settle what now is final."""
        sections = parse(self._text)
        blocks = tuple(block for section in sections for block in section.blocks)
        # A section that begins on a line still being written may yet turn out to belong to the one before: it settles nothing.
        whole_lines = self._text.count("\n")
        last = next((i for i in reversed(range(1, len(sections))) if sections[i].start_line < whole_lines), 0)
        if last:
            self._text = self._text_from(sections[last - 1].end_line)
        elif len(sections) == 1 and len(sections[0].items) >= LONGEST_OPEN_LIST:
            return self._cut_list(sections[0])
        return Look(blocks, sum(len(section.blocks) for section in sections[:last]))

    def _cut_list(self, section: Section) -> Look:
        """Settle all items but the last few of a long list: it would be drawn as a whole for each token otherwise."""
        line = section.items[-OPEN_ITEMS]
        head = "".join(self._text.splitlines(keepends=True)[:line])
        settled = tuple(block for part in parse(head) for block in part.blocks)
        if not all(isinstance(block, Flow) for block in settled):
            return Look(section.blocks, 0)
        self._text = self._text_from(line)
        joined = tuple(replace(block, joined=True) for block in settled if isinstance(block, Flow))
        return Look((*joined, *(block for part in parse(self._text) for block in part.blocks)), len(joined))

    def _text_from(self, line: int) -> str:
        return "".join(self._text.splitlines(keepends=True)[line:])
