"""What a client is told when its request can't be answered: a status, a sentence, and the field that it is about."""

from tokamac.engine.errors import TokamacError

KINDS: dict[str, tuple[int, str]] = {
    "GrammarError": (400, "invalid_schema"),
    "OptionError": (400, "unsupported_value"),
    "TemplateError": (400, "invalid_prompt"),
    "ContextError": (400, "context_length_exceeded"),
    "MemoryLimitError": (400, "out_of_memory"),  # not even beside no other reply: what fits later waits
    "AnotherModelError": (503, "model_changed"),
    "DeviceError": (503, "device_failed"),
    "EngineClosedError": (503, "engine_stopped"),
}
"""The engine's errors by class: status and code."""


class RequestError(TokamacError):
    """A request is refused, or failed.

    Args:
        message: what is wrong. hint: what to do.
        status: of HTTP.
        param: the field that it is about; "" where it is none.
        code: what a program may compare.
        retry_after_s: when it may be tried again; None where that would not help.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        status: int = 400,
        param: str = "",
        code: str = "invalid_request",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


def unsupported(param: str, what: str, hint: str = "Leave it out.") -> RequestError:
    """Return the error for a field that is known, and can't be honoured."""
    return RequestError(f"{param}: {what} is not supported", hint, param=param, code="unsupported_value")


def unexpected() -> RequestError:
    """Return the error for a failure of the server's own, of which its log tells more."""
    return RequestError("this should not happen; the server's log says where", status=500, code="internal")


def stopping() -> RequestError:
    """Return the error for a server that is about to end."""
    return RequestError("the server is being stopped", status=503, code="server_stopping")


def of_engine(kind: str, message: str, hint: str) -> RequestError:
    """Return the error for one of the engine's. kind: its class."""
    status, code = KINDS.get(kind, (500, "engine_error"))
    return RequestError(message, hint, status=status, code=code, retry_after_s=5 if status == 503 else None)


class EngineDownError(RequestError):
    """There is no engine now: it ended, and is started again."""

    def __init__(self, why: str, retry_after_s: int) -> None:
        hint = f"It is being started again: try in {retry_after_s} s."
        super().__init__(why, hint, status=503, code="engine_unavailable", retry_after_s=retry_after_s)
