"""Between the session and the engine's process: steps go out, events come in as messages of the screen."""

from collections.abc import Callable, Sequence
from pathlib import Path

from textual.message import Message

from ..backend.client import BackendEvent
from ..backend.keep_awake import KeepAwake
from ..backend.protocol import Request
from ..backend.sharing import CardFinder, ChatEngine


class EngineSaid(Message):
    """``event`` came from the engine's process ``process_number``."""

    def __init__(self, event: BackendEvent, process_number: int) -> None:
        super().__init__()
        self.event = event
        self.process_number = process_number


class Bridge:
    """Owns the process. ``post`` is called from other threads; Textual's ``post_message``, which it is set to, allows that."""

    post: Callable[[EngineSaid], object]

    def __init__(
        self, command: Sequence[str], log: Path, keep_awake: KeepAwake, finder: CardFinder | None = None
    ) -> None:
        self._command = command
        self._log = log
        self._keep_awake = keep_awake
        self._finder = finder
        self._share: Path | None = None
        self._process: ChatEngine | None = None
        self.process_number = 0

    @property
    def running(self) -> bool:
        """Whether there is a process that would hear a request."""
        return self._process is not None and self._process.alive

    def another(self) -> "Bridge":
        """Return a bridge to a process of its own, not yet started, of the same kind; its log stands beside this one's."""
        return Bridge(self._command, self._log.with_stem(f"{self._log.stem}-guide"), self._keep_awake)

    def start(self) -> None:
        """Start the process, ending one that runs. What the old one still says has another number."""
        self.end()
        self.process_number += 1
        number = self.process_number
        self._process = ChatEngine(
            self._command, self._log, lambda event: self.post(EngineSaid(event, number)), finder=self._finder
        )
        if self._share is not None:
            self._process.share(self._share)

    @property
    def server_url(self) -> str:
        """Where the server answers whose engine is used; "" where the engine is the chat's own."""
        return "" if self._process is None else self._process.server_url

    def share(self, path: Path) -> None:
        """Let other programs of the user ask this process, and those that follow it."""
        self._share = path
        if self._process is not None:
            self._process.share(path)

    def end(self) -> None:
        """End the process at once."""
        self._keep_awake.tell(self, busy=False)
        process, self._process = self._process, None
        if process is not None:
            process.kill()
        self.process_number += 1

    def ask(self, request: Request) -> None:
        """Send ``request``."""
        if self._process is not None:
            self._process.send(request)

    def set_busy(self, busy: bool) -> None:
        """Say whether the process is at work: then its silence means that it hangs, and the machine does not sleep."""
        self._keep_awake.tell(self, busy=busy)
        if self._process is not None:
            self._process.set_busy(busy)

    def close(self) -> None:
        """Ask the process to end and wait for it."""
        self._keep_awake.close()
        process, self._process = self._process, None
        self.process_number += 1
        if process is not None:
            process.close()
