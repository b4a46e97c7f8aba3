"""Where a session is; ``session`` draws how it goes from one to the next."""

from enum import Enum, auto


class Phase(Enum):
    """What the engine's process is at, as the session knows it."""

    LOADING = auto()
    IDLE = auto()
    PREFILL = auto()
    DECODING = auto()
    STOPPING = auto()
    FAILED = auto()
    UNLOADED = auto()
