"""Messages as lines to be read out: who says what."""

from collections.abc import Sequence

from tokamac.app.tui.conversation import Reply, Turn
from tokamac.app.tui.prose.messages import ended

NOTHING = "Nothing was said yet."


def last_turn(turns: Sequence[Turn]) -> str:
    """Return the last prompt and its reply, and how many turns there are."""
    if not turns:
        return NOTHING
    turn = turns[-1]
    lines = [f"Turn {len(turns)} of {len(turns)}."] if len(turns) > 1 else []
    lines += [f"system: {text}" for text in turn.system]
    lines += [f"you{_version(turn.place)}: {turn.prompt}"] if turn.key or turn.prompt else []  # else there is no prompt
    lines += [f"attached: {each.name}" for each in turn.attachments]
    lines += [f"system: {text}" for text in turn.between]
    return "\n".join([*lines, *([_reply(turn.reply, turn.reply_place)] if turn.reply is not None else [])])


def _reply(reply: Reply, place: tuple[int, int]) -> str:
    ending = ended(reply.ending, reply.reason)
    return f"{reply.model or 'reply'}{_version(place)}: {reply.text}" + (f"\n({ending})" if ending else "")


def _version(place: tuple[int, int]) -> str:
    return f" (version {place[0]} of {place[1]})" if place[1] > 1 else ""
