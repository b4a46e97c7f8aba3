"""What of a conversation is shown: the messages of the branch it stands on, in words, every text made safe."""

from collections.abc import Iterator
from dataclasses import dataclass

from tokamac.app.sanitise import sanitise, sanitise_line
from tokamac.app.store.values import Archive, Message
from tokamac.app.tui.kept import Measured, measured_of
from tokamac.app.tui.prose.messages import ended
from tokamac.app.tui.thinking import budget_spent
from tokamac.app.tui.units import count, rate, seconds
from tokamac.app.verdict import sentence
from tokamac.engine.events import Role
from tokamac.engine.limits.metrics import Metrics

WHO: dict[Role, str] = {"system": "System prompt", "user": "You", "assistant": "Assistant"}


@dataclass(frozen=True, slots=True)
class File:
    """An attachment: its name and its text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A message as it is shown. who: "You", or a model's name. ending: why a reply is not whole, "" where it is.

    thought: what to call the thinking. figures: what was measured of a reply, then what it means; empty where nothing was.
    """

    role: Role
    who: str
    text: str
    thinking: str = ""
    thought: str = ""
    files: tuple[File, ...] = ()
    ending: str = ""
    figures: tuple[str, ...] = ()


def title_of(archive: Archive) -> str:
    """Return the conversation's title, on one line."""
    return sanitise_line(archive.chat.title) or "Chat"


def entries(archive: Archive) -> Iterator[Entry]:
    """Yield what is shown, in the order of reading; a system prompt that the chat has of its own comes first."""
    system = archive.chat.settings.get("system")
    if isinstance(system, str) and system.strip():
        yield Entry("system", WHO["system"], sanitise(system))
    for message in _branch(archive):
        yield _entry(message)


def _branch(archive: Archive) -> list[Message]:
    by_id = {message.id: message for message in archive.messages}
    found, at = [], archive.chat.head
    while at is not None:
        found.append(by_id[at])
        at = by_id[at].parent
    return found[::-1]


def _entry(message: Message) -> Entry:
    kept = measured_of(message) if message.role == "assistant" else Measured()
    took = "" if kept.thinking_s is None else f" for {seconds(kept.thinking_s)}"
    spent = "" if kept.thinking_ended_at is None else f", {budget_spent(kept.thinking_ended_at)}"
    return Entry(
        role=message.role,
        who=sanitise_line(message.model) if message.role == "assistant" and message.model else WHO[message.role],
        text=sanitise(message.text),
        thinking=sanitise(message.thinking),
        thought=f"Thought{took}{spent}",
        files=tuple(File(sanitise_line(each.name), sanitise(each.text)) for each in message.attachments),
        ending=ended(kept.ending, kept.reason),
        figures=() if kept.metrics is None else (_figures(kept.metrics), sentence(kept.metrics, kept.diagnosis)),
    )


def _figures(metrics: Metrics) -> str:
    return " · ".join(
        (
            f"{count(metrics.prompt_tokens)} prompt tokens, {count(metrics.cached_tokens)} of them cached",
            f"TTFT {seconds(metrics.ttft_s)}",
            f"prefill {rate(metrics.prefill_tps)}",
            f"{count(metrics.generated_tokens)} tokens written",
            f"decode {rate(metrics.decode_tps)}",
        )
    )
