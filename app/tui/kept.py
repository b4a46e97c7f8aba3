"""A conversation as the store keeps it, and as the chat holds it: messages to a tree and back."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tokamac.app.backend.shapes import ShapeError, build
from tokamac.app.store.values import FinalState, Message
from tokamac.app.tui.conversation import Ending, Reply
from tokamac.app.tui.tree import Node, Tree
from tokamac.engine.limits.diagnosis import Diagnosis
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Measured:
    """What is kept of a reply beside its text.

    reason: why it failed; thinking_ended_at: the budget that ended its thinking. Where there was none neither is written down.
    """

    ending: Ending = "stop"
    thinking_s: float | None = None
    metrics: Metrics | None = None
    outliers: tuple[Outlier, ...] = ()
    diagnosis: Diagnosis | None = None
    reason: str = ""
    thinking_ended_at: int | None = None


def measured(reply: Reply) -> dict[str, Any]:
    """Return what is kept of ``reply`` beside its text, as plain values."""
    figures = (reply.metrics, reply.outliers, reply.diagnosis)
    kept = Measured(reply.ending, reply.thinking_s, *figures, reply.reason, reply.thinking_ended_at)
    plain = asdict(kept)
    if not kept.reason:
        del plain["reason"]
    if kept.thinking_ended_at is None:
        del plain["thinking_ended_at"]
    return {**plain, "outliers": [dict(each) for each in plain["outliers"]]}


def state_of(reply: Reply) -> FinalState:
    """Return the state in which a reply that ended so is kept."""
    states: dict[Ending, FinalState] = {"cancelled": "stopped", "lost": "failed", "failed": "failed"}
    return states.get(reply.ending, "complete")


def tree_of(messages: Iterable[Message], head: int | None) -> Tree:
    """Return the tree of stored messages, parents first, standing at ``head``. Its keys are the store's ids."""
    tree = Tree()
    for message in messages:
        tree.add(_node(message))
    if head in tree.nodes:
        tree.go(head)
    return tree


def _node(message: Message) -> Node:
    match message.role:
        case "user":
            return Node(message.id, message.parent, prompt=message.text, attachments=message.attachments)
        case "assistant":
            return Node(message.id, message.parent, reply=_reply(message))
        case "system":
            return Node(message.id, message.parent, system=message.text)


def _reply(message: Message) -> Reply:
    kept = measured_of(message)
    return Reply(
        text=message.text,
        thinking=message.thinking,
        thinking_s=kept.thinking_s,
        ending=kept.ending,
        model=message.model,
        metrics=kept.metrics,
        outliers=kept.outliers,
        diagnosis=kept.diagnosis,
        reason=kept.reason,
        thinking_ended_at=kept.thinking_ended_at,
    )


def measured_of(message: Message) -> Measured:
    """Return the figures of a stored reply. What another version measured, and this one can't read, is not shown."""
    endings: dict[str, Ending] = {"stopped": "cancelled", "failed": "failed", "partial": "cancelled"}
    unmeasured = Measured(endings.get(message.state, "stop"))
    if message.metrics is None:
        return unmeasured
    try:
        known: Measured = build(Measured, dict(message.metrics), "metrics")
    except ShapeError:
        return unmeasured
    return known
