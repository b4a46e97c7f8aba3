"""What is in the context: the parts of the next prompt, and whether they fit. Pure, like the session.

    system │ tools │ file │ prompt │ reply │ file │ prompt │ reply │ result │ reply │ … │ draft │ free

The engine counts each part's tokens; of tools, what the chat template writes of their definitions. What it adds around the other
parts is small, and not counted. So a sum of parts is a little less than the prompt: where even that is over the limit, the prompt
is refused before it is sent.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tokamac.engine.options import ToolSpec

from .. import units
from ..sanitise import sanitise_line
from ..store.values import Attachment
from ..tools.tool import call_line
from .attachments import Draft
from .background import Countable
from .conversation import Turn, prompts_of

Kind = Literal["system", "tools", "file", "prompt", "reply", "result", "draft"]
TEMPLATE_SHARE = 8
"""A chat template writes a tool's definition in fewer bytes than these times its own."""
Count = Callable[[Countable], int | None]
"""Returns the tokens of a part; None while they are unknown."""


_NAMES: dict[Kind, str] = {
    "system": "the system prompt", "tools": "the list of tools", "prompt": "a prompt", "reply": "a reply",
    "result": "the result of a tool", "draft": "the message",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContextPart:
    """A part of the next prompt.

    counted: what is counted of it: its text, or the tools that the model is told of. key: of the prompt whose turn it is in; 0 is
    of none.
    """

    kind: Kind
    counted: Countable
    key: int = 0

    @property
    def name(self) -> str:
        """What a sentence calls it."""
        if isinstance(self.counted, Attachment):
            return sanitise_line(self.counted.name)
        return _NAMES.get(self.kind, "")

    @property
    def most_tokens(self) -> int:
        """The most tokens that it can have: no token is less than a byte."""
        match self.counted:
            case str():
                text = self.counted
            case Attachment():
                text = self.counted.text
            case tools:
                text = TEMPLATE_SHARE * "".join(map(repr, tools))
        return len(text.encode("utf-8", "replace"))


def parts(
    system: str, turns: Sequence[Turn], draft: Draft | None = None, *, tools: tuple[ToolSpec, ...] = ()
) -> list[ContextPart]:
    """Return the parts of what would be sent, in their order. tools: those that the model is told of."""
    found = _texts("system", (system,)) + ([ContextPart("tools", tools)] if tools else [])
    for turn, key in zip(turns, prompts_of(turns), strict=True):
        found += _texts("result", [each.text for each in turn.results], key)
        found += _texts("system", turn.system)
        said = turn.reply is not None and turn.reply.is_said  # else neither the prompt is sent again
        found += _prompt("prompt", turn.prompt, turn.attachments, key) if said else []
        found += _texts("system", turn.between)
        if turn.reply is not None and said:
            found += _texts("reply", ("\n".join([turn.reply.text, *map(call_line, turn.reply.calls)]).strip(),), key)
    return found if draft is None else [*found, *_prompt("draft", draft.text, draft.attachments, 0)]


def _prompt(kind: Kind, text: str, attachments: Sequence[Attachment], key: int) -> list[ContextPart]:
    return [*(ContextPart("file", each, key) for each in attachments), *_texts(kind, (text,), key)]


def _texts(kind: Kind, texts: Sequence[str], key: int = 0) -> list[ContextPart]:
    return [ContextPart(kind, text, key) for text in texts if text.strip()]


def refusal(found: Sequence[ContextPart], count: Count, limit: int) -> str:
    """Return why a prompt of these parts can't be sent, and what to do; "" where it can, as far as it is counted."""
    known = [(count(each.counted) or 0, each) for each in found]
    total = sum(tokens for tokens, _ in known)
    if total < limit:
        return ""
    most, largest = max(known, key=lambda each: each[0])
    context = f"the context holds {units.count(limit)}"
    if most >= limit:
        said = f"{_beginning(largest)} alone is {units.count(most)} tokens; {context}. "
        return said + _advice(largest)
    said = f"This prompt is {units.count(total)} tokens; {context}. "
    return f"{said}The largest part is {largest.name} with {units.count(most)}. /context shows all parts and leaves them out."


def _advice(part: ContextPart) -> str:
    match part.kind:
        case "file" if not part.key:
            return f"/detach {part.name} removes it; @{part.name}:1-200 attaches some of its lines."
        case "draft":
            return "Shorten it."
        case "system":
            return "Shorten it with /system."
        case "tools":
            return "/tools turns them off."
        case _:
            return "/context leaves it out; /new starts a new chat."


def _beginning(part: ContextPart) -> str:
    """Return its name as a sentence begins with it."""
    return part.name if part.kind == "file" else part.name[:1].upper() + part.name[1:]


@dataclass(frozen=True, slots=True)
class ContextRow:
    """A row of what is in the context.

    tokens: None while they are unknown. left_out: it is kept, but not sent. key, file: what ``Session.prune`` takes; a key of 0
    can't be left out.
    """

    kind: Kind
    name: str
    tokens: int | None
    left_out: bool = False
    key: int = 0
    file: str = ""


@dataclass(frozen=True, slots=True)
class ContextUse:
    """What the next prompt holds, in its order. capacity: tokens that the context holds; None is unknown."""

    rows: tuple[ContextRow, ...]
    capacity: int | None

    @property
    def used(self) -> int:
        """The tokens that would be sent, as far as they are known."""
        return sum(row.tokens or 0 for row in self.rows if not row.left_out)

    @property
    def free(self) -> int | None:
        """The tokens that are left; None is unknown."""
        return None if self.capacity is None else max(0, self.capacity - self.used)

    def by_kind(self) -> dict[str, int]:
        """Return the tokens of system, tools, files, turns and draft that would be sent."""
        named = {
            "system": "system", "tools": "tools", "file": "files", "prompt": "prompts", "reply": "replies", "result": "results",
            "draft": "draft",
        }  # fmt: skip
        found = dict.fromkeys(named.values(), 0)
        for row in self.rows:
            if not row.left_out:
                found[named[row.kind]] += row.tokens or 0
        return found

    def consequence(self, index: int) -> str:
        """Return what leaving a row out, or sending it again, would do: nothing after its place stays in the prompt cache."""
        row = self.rows[index]
        if row.kind == "tools":
            return "This is what the model is told of its tools. /tools turns them off."
        if not row.key:
            return "This part is always sent."
        moved = [each for each in self.rows if each.key == row.key and row.file in ("", each.file)]
        behind = self.rows[self.rows.index(moved[0]) :]
        kept = [each for each in behind if each not in moved and not each.left_out and each.kind != "draft"]
        tokens, again = _sum(moved), _sum(kept) + (_sum(moved) if row.left_out else 0)
        verb = "Sending it again takes" if row.left_out else "Leaving it out frees"
        recomputed = f"{units.count(again)} tokens" if again else "nothing"
        return f"{verb} {units.count(tokens)} tokens; the next prompt recomputes {recomputed}."


def _sum(rows: Iterable[ContextRow]) -> int:
    return sum(row.tokens or 0 for row in rows)


def list_parts(
    system: str,
    turns: Sequence[Turn],
    draft: Draft,
    pruned: set[tuple[int, str]],
    count: Count,
    *,
    tools: tuple[ToolSpec, ...] = (),
) -> list[ContextRow]:
    """Return the rows of what would be sent, with what is left out of it. tools: those that the model is told of."""
    rows: list[ContextRow] = []
    for part in parts(system, turns, draft, tools=tools):
        file = part.counted.name if isinstance(part.counted, Attachment) and part.key else ""
        left_out = (part.key, "") in pruned or (bool(file) and (part.key, file) in pruned)
        rows.append(ContextRow(part.kind, _said(part.counted), count(part.counted), left_out, part.key, file))
    return rows


def _said(counted: Countable) -> str:
    """Return what a row says of it: how a text begins, or a name."""
    match counted:
        case str():
            return sanitise_line(" ".join(counted[:200].split()))
        case Attachment():
            return sanitise_line(counted.name)
        case tools:
            return sanitise_line(", ".join(each.name for each in tools))
