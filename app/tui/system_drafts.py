"""System prompts that were written and are not used yet: one a chat, for as long as the app runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Written:
    """A system prompt, and whether it is its chat's alone."""

    text: str
    own: bool


class SystemDrafts:
    """Keeps them by the chat's id; None stands for a new chat, which nothing keeps yet."""

    def __init__(self) -> None:
        self._drafts: dict[str | None, Written] = {}

    def of(self, chat: str | None) -> Written | None:
        """Return what was written in ``chat``, if anything was."""
        return self._drafts.get(chat)

    def keep(self, chat: str | None, draft: Written | None) -> None:
        """Keep ``draft`` in place of what was written in ``chat``; None: nothing is."""
        self._drafts.pop(chat, None)
        if draft is not None:
            self._drafts[chat] = draft

    def begun(self, chat: str) -> None:
        """The new chat is kept from here on as ``chat``, and what was written in it goes with it."""
        self.keep(chat, self._drafts.pop(None, None))
