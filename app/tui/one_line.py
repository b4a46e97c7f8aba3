"""A message on one line: who says it, and how it begins. Foreign text: made safe."""

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui.model_rows import short_name
from tokamac.app.tui.prose.messages import ENDINGS
from tokamac.app.tui.tree import Node


def said_in(node: Node, most: int) -> tuple[str, str]:
    """Return who says a message, and at most so many characters of what is said, or of why nothing is."""
    if node.prompt is not None:
        return "you", _beginning(node.prompt, most) or _beginning(
            ", ".join(each.name for each in node.attachments), most
        )
    if node.system is not None:
        return "system", _beginning(node.system, most)
    if node.reply is None:
        return "reply", "is being written"
    said = _beginning(node.reply.text, most) or ENDINGS[node.reply.ending] or "says nothing"
    return short_name(node.reply.model) or "reply", said


def _beginning(text: str, most: int) -> str:
    said = sanitise_line(text.lstrip()[: 4 * most])  # more is not shown, whatever it becomes
    return said if len(said) <= most else f"{said[: most - 1]}…"
