"""Calls and results in a conversation: which dialect a chat template writes, and history that it can render."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import TemplateError
from ..events import Message, ToolCall
from ..options import ToolSpec
from ..vision.picture import Picture
from .calls import CallReader, short_id
from .dialects import BY_NAME, HARMONY, MISTRAL_START, TABLE, UNWRITTEN, Dialect, TurnMarks, json_dialect, padded

ID = re.compile(r"[A-Za-z0-9]{9}")  # mistral's templates refuse any other

# Tried on a chat template: does it write definitions?
PROBES = (
    ToolSpec("find_probe", "Finds a probe.", {"type": "object", "properties": {"word": {"type": "string"}}}),
    ToolSpec("count_probes", "Counts probes.", {"type": "object", "properties": {"word": {"type": "string"}}}),
)
SHOWN = "These are the pictures of the results above."
ASKED, SAID = Message("user", "What is prefill?"), "Prefill reads the prompt."
CALLED = tuple(ToolCall(each.name, f'{{"word": "w{at}w"}}', f"probecal{at}") for at, each in enumerate(PROBES))


def settled(messages: Sequence[Message], support: "ToolSupport") -> list[Message]:
    """Return a conversation that a template can render."""
    # A call that could not be read becomes text, where its reply's text does not have it; a result without a call is
    # the user's.
    waiting: dict[str, ToolCall] = {}
    out: list[Message] = []
    for message in messages:
        waiting |= {call.id: call for call in message.tool_calls}
        call = waiting.pop(message.tool_call_id, None) if message.role == "tool" else None
        if message.role == "tool" and (call is None or call.problem or not support.has_results):
            _join(out, Message("user", message.content if call is not None and call.problem else _result(message)))
        elif message.role == "user":
            _join(out, message)  # after such a result: templates refuse two in a row
        elif message.tool_calls:
            said = _with_calls(message, [each for each in message.tool_calls if not each.problem])
            if said.content and said.tool_calls and not support.with_text:
                out.append(replace(said, tool_calls=()))
                said = replace(said, content="", thinking="")
            out.append(said)
        else:
            out.append(message)
    return out if support.at_once else _one_by_one(out)


def _join(out: list[Message], message: Message) -> None:
    last = out[-1] if out else None
    if last is None or last.role != message.role or message.role == "tool" or last.tool_calls or message.tool_calls:
        out.append(message)
        return
    content, thinking = (
        "\n\n".join(filter(None, pair)) for pair in ((last.content, message.content), (last.thinking, message.thinking))
    )
    out[-1] = replace(last, content=content, thinking=thinking, images=(*last.images, *message.images))


def plainer(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Yield a conversation in ever plainer forms, for templates that refuse it."""
    answered = {each.tool_call_id for each in messages if each.role == "tool"}
    called = [_with_calls(each, [call for call in each.tool_calls if call.id in answered]) for each in messages]
    for form in (called, as_text(called)):
        turns = _alternating(form)
        yield turns
        yield folded(turns)


def _alternating(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    for message in messages:
        is_later = message.role == "system" and bool(out)
        if message.role == "assistant" and not any(each.role != "system" for each in out):
            out.append(Message("user", ""))
        _join(out, replace(message, role="user") if is_later else message)
    return out


def folded(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose system message is the beginning of its first user's."""
    if not messages or messages[0].role != "system":
        return [*messages]
    out = [replace(messages[0], role="user")]
    for message in messages[1:]:
        _join(out, message)
    return out


def with_shown_results(messages: Sequence[Message]) -> Sequence[Message]:
    """Return a conversation in which the user shows the pictures of results: few templates write them elsewhere."""
    if not any(each.role == "tool" and each.images for each in messages):
        return messages
    out: list[Message] = []
    shown: list[Picture | str | Path | bytes] = []
    for message in (*messages, None):
        if shown and (message is None or message.role != "tool"):
            out.append(Message("user", SHOWN, images=tuple(shown)))
            shown = []
        if message is None:
            break
        if message.role == "tool":
            shown += message.images
            out.append(replace(message, images=()))
        elif message.role == "user":
            _join(out, message)
        else:
            out.append(message)
    return out


def _result(message: Message) -> str:
    return f"Result of {message.name or 'the call'}:\n{message.content}"


def _with_calls(message: Message, kept: Sequence[ToolCall]) -> Message:
    """Return a message whose other calls are in its text, unless that has them already."""
    lost = [
        each
        for each in message.tool_calls
        if each not in kept and not (each.problem and each.arguments in message.content)
    ]
    words = [f"[calls {each.name} with {each.arguments}]" for each in lost]
    return replace(message, content="\n".join(filter(None, (message.content, *words))), tool_calls=tuple(kept))


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    out: list[Message] = []
    results = {each.tool_call_id: each for each in messages if each.role == "tool"}
    told: set[str] = set()
    for message in messages:
        if message.role == "tool" and message.tool_call_id in told:
            continue
        if len(message.tool_calls) < 2:
            out.append(message)
            continue
        for at, call in enumerate(message.tool_calls):
            first = message if at == 0 else Message("assistant", "")
            out.append(replace(first, tool_calls=(call,)))
            if call.id in results:
                out.append(results[call.id])
                told.add(call.id)
    return out


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose calls and results are text."""
    out: list[Message] = []
    for message in messages:
        if message.role in ("tool", "user"):
            text = _result(message) if message.role == "tool" else message.content
            _join(out, Message("user", text, images=message.images))
        else:
            out.append(_with_calls(message, ()))
    return out


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """How a template has calls.

    at_once: several in a turn. with_text: beside a text. as_text: it wants arguments as JSON text. in_text: it writes
    no calls, so that they go into the text. in_message: it looks for definitions in the system message. has_results:
    it has a role for them.
    """

    dialect: Dialect
    at_once: bool = True
    with_text: bool = True
    as_text: bool = False
    in_text: bool = False
    in_message: bool = False
    has_results: bool = True


# Renders a conversation with the probes as tools: arguments as JSON text or as an object; definitions in the message.
Render = Callable[[Sequence[Message], bool, bool], str]


def find_support(
    render: Render, wanted: object, is_token: Callable[[str], bool], source: str, *, has_channels: bool = False
) -> ToolSupport | None:
    """Return how a template's calls are written and read; None where it has no place for them.

    wanted: the dialect that the model's files name, taken where rendering does not tell. source: the template.
    """

    def tried(messages: Sequence[Message], as_text: bool = False, in_message: bool = False) -> str:
        try:
            return render(messages, as_text, in_message)
        except TemplateError:
            return ""

    unwritten = [each for each in UNWRITTEN if is_token(each.start) or each.start in source]
    unwritten = [replace(each, ends=tuple(e for e in each.ends if is_token(e) or e in source)) for each in unwritten]
    if not all(each.name in tried([ASKED]) for each in PROBES):
        asked = tried([Message("system", SAID), ASKED], in_message=True)
        return _in_text(tried, unwritten, in_message=True) if all(each.name in asked for each in PROBES) else None
    if has_channels:
        return _support(tried, HARMONY, as_text=False)
    for as_text in (False, True):
        for dialect in _written(tried, as_text):
            if (found := _support(tried, dialect, as_text)) is not None:
                return found
    fallen = [BY_NAME[wanted]] if isinstance(wanted, str) and wanted in BY_NAME else []
    fallen += [each for each in TABLE if is_token(each.start) and any(map(is_token, each.ends))]
    found = next((found for each in fallen if (found := _support(tried, each, as_text=False)) is not None), None)
    return found or _in_text(tried, unwritten, in_message=False)


def _in_text(tried: Callable[..., str], dialects: Sequence[Dialect], *, in_message: bool) -> ToolSupport | None:
    if not dialects or SAID not in tried([ASKED, Message("assistant", SAID)]):
        return None
    has_results = "r0r" in tried(_conversation(CALLED[:1]), in_message=in_message)
    return ToolSupport(dialects[0], in_text=True, in_message=in_message, has_results=has_results)


def _written(tried: Callable[..., str], as_text: bool) -> list[Dialect]:
    """Return the dialects in which a rendered call is read back as what it was."""
    turn = TurnMarks.around(SAID, tried([ASKED, Message("assistant", SAID)]))
    plain = tried(_conversation(CALLED[:1]), as_text)
    found: list[tuple[bool, Dialect]] = []
    for dialect in (json_dialect(plain, CALLED[0], turn), *TABLE):
        if dialect is None:
            continue
        rendered = plain
        if dialect.id_form:
            rendered = tried(_conversation([replace(CALLED[0], id=fit_id(dialect, CALLED[0], 0))]), as_text)
        for mark in dict.fromkeys((dialect.start, *dialect.bare)):
            if mark and _reads_back(dialect, mark, rendered, turn):
                found.append((mark != dialect.start, padded(dialect, rendered, "w0w")))
                break
    return [dialect for _, dialect in sorted(found, key=lambda each: each[0])]


def _conversation(calls: Sequence[ToolCall], said: str = "") -> list[Message]:
    results = [Message("tool", f"r{at}r", tool_call_id=each.id, name=each.name) for at, each in enumerate(calls)]
    return [ASKED, Message("assistant", said, tool_calls=tuple(calls)), *results]


def _reads_back(dialect: Dialect, mark: str, rendered: str, turn: TurnMarks) -> bool:
    begin = word = rendered.rfind("w0w")
    end = rendered.find(turn.after, word) if turn.after else -1
    rendered = rendered if end < 0 else rendered[:end]
    while begin > 0 and (begin := rendered.rfind(mark, 0, begin)) >= 0:
        calls = CallReader(dialect, PROBES, 0).read(rendered[begin:].removeprefix(dialect.start))
        if [(each.name, each.values, each.problem) for each in calls] == [(CALLED[0].name, CALLED[0].values, "")]:
            return True
    return False


def _support(tried: Callable[..., str], dialect: Dialect, as_text: bool) -> ToolSupport | None:
    calls = [replace(each, id=fit_id(dialect, each, at)) for at, each in enumerate(CALLED)]
    one, both = (tried(_conversation(calls[:count]), as_text) for count in (1, 2))
    if "w0w" not in one or "r0r" not in one:
        return None
    at_once = all(each in both for each in ("w0w", "w1w", "r0r", "r1r"))
    return ToolSupport(dialect, at_once, SAID in tried(_conversation(calls[:1], SAID), as_text), as_text)


def fit_id(dialect: Dialect, call: ToolCall, number: int) -> str:
    """Return the id of the conversation's call ``number`` in the form that a template needs."""
    if dialect.id_form:
        return call.id if call.name in call.id else dialect.id_form.format(call.name, number)
    if dialect.start == MISTRAL_START:
        return call.id if not call.id or ID.fullmatch(call.id) else short_id(call.id)
    return call.id


def with_fit_ids(dialect: Dialect, messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages whose calls have ids in the form that a template needs."""
    if not dialect.id_form and dialect.start != MISTRAL_START:
        return messages
    ids: dict[str, str] = {}
    for call in (each for message in messages for each in message.tool_calls):
        ids[call.id] = fit_id(dialect, call, len(ids))
    return [
        replace(
            each,
            tool_calls=tuple(replace(call, id=ids[call.id]) for call in each.tool_calls),
            tool_call_id=ids.get(each.tool_call_id, each.tool_call_id),
        )
        for each in messages
    ]
