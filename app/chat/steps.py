"""Where a session is; ``session`` draws how it goes from one to the next.

What the session asks of the world (effects) and tells the screen (changes): one small dataclass each.
"""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from tokamac.engine.events import TextKind, ToolCall

from ..backend.protocol import Request
from ..store.values import Attachment, ToolResult
from .attachments import Draft
from .conversation import Conversation, Reply, Turn
from .versions import Version, Versions


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start the engine's process; one that runs is ended first."""


@dataclass(frozen=True, slots=True)
class EndEngine:
    """End the engine's process at once."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send ``request`` to the engine's process."""

    request: Request


@dataclass(frozen=True, slots=True)
class TurnBegun:
    """A prompt was sent: show it, and room for its reply. ``again``: the last reply is made anew in its place."""

    turn: Turn
    again: bool = False


@dataclass(frozen=True, slots=True)
class ReplyGrew:
    """More of the running reply. guessed: characters of ``text``, from and to, whose tokens were guessed and came true."""

    text: str
    kind: TextKind
    guessed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyEnded:
    """The running reply is whole, or as whole as it will be."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class VersionsBegun:
    """Several replies to one prompt are asked for: show room for each. resumed: they were before, and are shown again."""

    versions: Versions
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class VersionGrew:
    """More of one of them."""

    versions: Versions
    version: Version
    text: str
    kind: TextKind


@dataclass(frozen=True, slots=True)
class VersionEnded:
    """One of them is whole, or as whole as it will be. After the last, ``Moved`` shows the one that is kept."""

    versions: Versions
    version: Version


@dataclass(frozen=True, slots=True)
class Resumed:
    """The conversation that was opened is being written: show ``turn``, whose reply is what was said so far, as growing."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Moved:
    """Another path of the conversation is read: show ``turns``, which hold all of it up to here."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """Something of the conversation is left out of what is sent, or is sent again."""


@dataclass(frozen=True, slots=True)
class Revised:
    """The user edited a reply: its new version is at the end of ``turns``. Show them."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """Another conversation is held from here on: show ``turns``. new: it is empty, and nothing of it is kept yet."""

    turns: tuple[Turn, ...]
    new: bool = False


@dataclass(frozen=True, slots=True)
class Titled:
    """The model gave the conversation a title: plain text on one line, safe to show."""

    title: str


@dataclass(frozen=True, slots=True)
class DraftReturned:
    """Prompts that waited will not be sent, or one was refused: they belong in the box again."""

    text: str
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRefused:
    """A prompt is not sent, because of ``why``; ``draft`` belongs in the box again. None: it never left it."""

    why: str
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """One sentence for the reader."""

    text: str
    severity: Literal["information", "warning", "error"] = "information"


@dataclass(frozen=True, slots=True)
class AskConsent:
    """A call of the model's waits for the user: ``Session.consent`` takes the answer."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class RunTool:
    """Run ``call``, which is allowed; ``Session.tool_ended`` takes what came of it."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolAnswered:
    """A call is answered, by the message ``key``. Nothing waits for the user's consent to it any more."""

    key: int
    result: ToolResult


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """``step`` is of ``conversation``, which is not shown: its reply runs in the background."""

    conversation: Conversation
    step: TurnBegun | ReplyGrew | ReplyEnded | PromptRefused | DraftReturned | ToolAnswered


Step = (
    StartEngine
    | EndEngine
    | Ask
    | TurnBegun
    | VersionsBegun
    | VersionGrew
    | VersionEnded
    | Resumed
    | ReplyGrew
    | ReplyEnded
    | Moved
    | Pruned
    | Revised
    | Opened
    | Titled
    | DraftReturned
    | PromptRefused
    | Notice
    | Elsewhere
    | AskConsent
    | RunTool
    | ToolAnswered
)


class EnginePhase(Enum):
    """What the engine's process is at, as the session knows it."""

    LOADING = auto()
    IDLE = auto()
    PREFILL = auto()
    DECODING = auto()
    STOPPING = auto()
    TOOLS = auto()
    """It is idle, while the calls of its reply are answered."""
    FAILED = auto()
    UNLOADED = auto()
