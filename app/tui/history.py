"""Going back through what was sent before, without losing what is being written. Pure; newest first, as the store tells it."""

from collections.abc import Callable, Sequence

from tokamac.app.tui.attachments import Draft

Sent = Callable[[], Sequence[str]]
"""Returns what was sent, newest first."""


class History:
    """Where one is in what was sent. What stood in the box before, or was changed there, is the draft one comes back to."""

    def __init__(self) -> None:
        self._sent: Sequence[str] = ()
        self._at = -1  # of what is shown in what was sent; -1 is the draft
        self._draft = Draft()

    def older(self, shown: Draft, sent: Sent) -> Draft | None:
        """Return what was sent before what the box shows; None where nothing was."""
        if not self._shows(shown):
            self._sent, self._at, self._draft = _others(sent(), shown.text), -1, shown
        if self._at + 1 >= len(self._sent):
            return None
        self._at += 1
        return self._here()

    def newer(self, shown: Draft) -> Draft | None:
        """Return what was sent after what the box shows, at last the draft; None where the box shows that."""
        if not self._shows(shown):
            return None
        self._at -= 1
        return self._here()

    def forget(self) -> None:
        """Begin anew: what the box held was sent."""
        self._at = -1

    def _shows(self, shown: Draft) -> bool:
        return self._at >= 0 and shown == self._here()

    def _here(self) -> Draft:
        return self._draft if self._at < 0 else Draft(self._sent[self._at])


def _others(sent: Sequence[str], text: str) -> Sequence[str]:
    """Return what was sent without the last, where that is what stands in the box: a prompt that came back."""
    return sent[1:] if sent and text and sent[0] == text else sent
