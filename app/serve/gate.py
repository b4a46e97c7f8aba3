"""Who may ask the server: names of this machine, web pages, and the token."""

import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from tokamac.engine.errors import TokamacError, access_hint

from .request import RequestError

# On loopback any local program may ask, but no web page: pages send an ``Origin``, and DNS rebinding shows in
# ``Host``. Elsewhere a bearer token is required, from a file that only the user can read; host names protect
# nothing there.


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
TOKEN_BYTES = 32
LONGEST_TOKEN = 512
HOST = re.compile(r"(?:(?P<name>[\w.-]+)|\[(?P<address>[0-9A-Fa-f:.]+)\])(?::\d*)?", re.ASCII)


class TokenFileError(TokamacError):
    """The token file can't be created, or can't be trusted."""


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def token_of(file: Path) -> str:
    """Return the file's token, created if missing. Raises TokenFileError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            return _kept(file)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(token + "\n")
    except OSError as error:
        why = f"{file} can't be used for the token: {error.strerror or error}"
        raise TokenFileError(why, access_hint(error, "Check the folder and its permissions.")) from error
    return token


def _kept(file: Path) -> str:
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid != os.getuid():
            raise TokenFileError(f"others can read or write {file}", f"Remove it, or: chmod 600 {file}")
        token = opened.read(LONGEST_TOKEN + 1).decode("ascii", "replace").strip()
    if not 16 <= len(token) <= LONGEST_TOKEN or not token.isprintable():
        raise TokenFileError(f"{file} holds no token", "Remove it: another is made.")
    return token


class Gate:
    """Checks requests. hosts: allowed host names, None for any (a token is needed then). token: None if not needed."""

    def __init__(self, hosts: Collection[str] | None, origins: Collection[str] = (), token: str | None = None) -> None:
        self._hosts = None if hosts is None else frozenset(each.lower().rstrip(".") for each in hosts)
        self._origins = frozenset(origins)
        self._token = None if token is None else token.encode()

    def check(self, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if self._hosts is not None and (name := _host_name(host)) not in self._hosts:
            # Not even Docker's name for this machine, which any network may answer for.
            raise RequestError(
                f"this server is not called {host!r:.80}", f"Ask for localhost, or start it with --allow-host {name or 'NAME'}.",
                status=403, code="wrong_host",
            )  # fmt: skip
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins:
            raise RequestError(
                f"a web page of {origin!r:.80} may not ask", "Start the server with --allow-origin to let it.", status=403,
                code="wrong_origin",
            )  # fmt: skip
        if self._token is not None and not self._is_token(headers):
            raise RequestError(
                "the token is missing or wrong",
                "Send the one of the server's token file as a bearer token, or as x-api-key.",
                status=401, code="invalid_api_key",
            )  # fmt: skip

    def _is_token(self, headers: Mapping[str, str]) -> bool:
        assert self._token is not None
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token)

    def allows(self, origin: str | None) -> bool:
        return origin in self._origins


def _host_name(host: str) -> str:
    found = HOST.fullmatch(host)
    return "" if found is None else (found["name"] or found["address"]).lower().rstrip(".")
