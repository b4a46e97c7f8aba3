"""Steps of a session: effects on the world and changes for the screen, one dataclass each; and its phases."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from tokamac.engine.events import TextKind, ToolCall

from ..backend.protocol import Request
from ..store.values import Attachment, ToolResult
from ..tools.calls import Preview
from .attachments import Draft
from .conversation import Conversation, Reply, Turn
from .versions import Version, Versions


@dataclass(frozen=True, slots=True)
class StartEngine:
    """Start an engine process, ending a running one."""


@dataclass(frozen=True, slots=True)
class EndEngine:
    """Kill the engine process."""


@dataclass(frozen=True, slots=True)
class Ask:
    request: Request


@dataclass(frozen=True, slots=True)
class TurnBegun:
    """A prompt was sent. again: its reply replaces the last one."""

    turn: Turn
    again: bool = False


@dataclass(frozen=True, slots=True)
class ReplyGrew:
    """The reply has grown. guessed: (start, end) characters of ``text`` from accepted draft tokens."""

    text: str
    kind: TextKind
    guessed: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplyEnded:
    """The reply has ended."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class VersionsBegun:
    """Versions of a reply were requested. resumed: running ones are shown again."""

    versions: Versions
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class VersionGrew:
    versions: Versions
    version: Version
    text: str
    kind: TextKind


@dataclass(frozen=True, slots=True)
class VersionEnded:
    """A version has ended; after the last, ``Moved`` shows the kept one."""

    versions: Versions
    version: Version


@dataclass(frozen=True, slots=True)
class Resumed:
    """A conversation with a running reply was opened: ``turn`` holds the reply so far."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Moved:
    """Another path is active: show all ``turns``."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Pruned:
    """A part was excluded from the prompt, or included again."""


@dataclass(frozen=True, slots=True)
class Revised:
    """The user edited a reply: its new version ends ``turns``."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Opened:
    """Another conversation is open. new: it is empty and unsaved."""

    turns: tuple[Turn, ...]
    new: bool = False


@dataclass(frozen=True, slots=True)
class Titled:
    """The model's title: one sanitized line."""

    title: str


@dataclass(frozen=True, slots=True)
class DraftReturned:
    """Unsent or refused prompts return to the input box."""

    text: str
    attachments: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptFailed:
    """Prompt ``key`` failed before any reply text: an empty input box edits it."""

    key: int
    draft: Draft


@dataclass(frozen=True, slots=True)
class PromptRefused:
    """A prompt was refused; ``draft`` returns to the input box. None: it never left it."""

    why: str
    draft: Draft | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    text: str
    severity: Literal["information", "warning", "error"] = "information"


@dataclass(frozen=True, slots=True)
class AskConsent:
    """A tool call needs the user's consent: answer with ``Session.consent``. preview: of one that acts."""

    call: ToolCall
    preview: Preview | None = None


@dataclass(frozen=True, slots=True)
class StopTools:
    """End what a call that runs has started."""


@dataclass(frozen=True, slots=True)
class RunTool:
    """Run an allowed tool call; report to ``Session.tool_ended``."""

    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolAnswered:
    """A call is answered by message ``key``; its consent question is void."""

    key: int
    result: ToolResult


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """``step`` of a conversation in the background."""

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
    | PromptFailed
    | PromptRefused
    | Notice
    | Elsewhere
    | AskConsent
    | StopTools
    | RunTool
    | ToolAnswered
)


class EnginePhase(Enum):
    LOADING = auto()
    IDLE = auto()
    PREFILL = auto()
    DECODING = auto()
    STOPPING = auto()
    TOOLS = auto()  # it is idle, while the calls of its reply are answered
    FAILED = auto()
    UNLOADED = auto()
