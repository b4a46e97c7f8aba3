"""A web page as text: one request that the user allowed, to a public address, bounded in bytes and seconds."""

# The name is resolved here, each of its addresses must be public, and the connection goes to the one that was checked:
# a name that means another address a moment later leads nowhere. Redirects are checked the same way. There are no
# proxies, cookies or other files. HTML is read in a child process, which costs at most its deadline (this module:
# bytes on stdin, text on stdout).

import http.client
import ipaddress
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from .calls import ToolError

MOST_BYTES = 4_000_000
DEADLINE_S = 20.0  # of all requests together
READING_S = 10.0
MOST_REDIRECTS = 5
LONGEST_ADDRESS = 2_048
SCHEMES = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
TEXTS = ("text/", "application/json", "application/xml", "application/xhtml+xml")
HTML = ("text/html", "application/xhtml+xml")
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset=["']?([A-Za-z0-9_-]{1,40})""", re.IGNORECASE)

IP = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Sequence[str]]


def is_address(typed: str) -> bool:
    return typed.lower().startswith(("http://", "https://"))


def check(address: str) -> SplitResult:
    """Return the parts of a web address. Raises ToolError for what is none, or holds a password."""
    if len(address) > LONGEST_ADDRESS or any(char <= " " or char == "\x7f" for char in address):
        raise ToolError("that is no web address: it is too long, or has spaces in it")
    try:
        parts = urlsplit(address)
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError:
        raise ToolError(f"{address:.80} is no web address") from None
    if parts.scheme not in SCHEMES or not host or port == 0:
        raise ToolError(f"{address:.80} is no web address")
    if "@" in parts.netloc:
        raise ToolError("a web address with a name or password in it is not fetched")
    where = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=where if port is None else f"{where}:{port}", fragment="")


def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a name. Raises ToolError."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise ToolError(f"{host} can't be found: {error.strerror or error}") from error


def public(host: str, port: int, resolve: Resolve) -> str:
    """Return a public address of a name. Raises ToolError where any of its addresses is not public."""
    addresses = resolve(host, port)
    for each in addresses:
        found: IP = ipaddress.ip_address(each.partition("%")[0])
        inner: list[IP] = [found, *_inside(found)] if isinstance(found, ipaddress.IPv6Address) else [found]
        if not all(one.is_global and not one.is_multicast and not one.is_reserved for one in inner):
            raise ToolError(f"{host} is {each}, an address of this machine or network; only public ones are fetched")
    if not addresses:
        raise ToolError(f"{host} can't be found")
    return addresses[0]


NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _inside(address: ipaddress.IPv6Address) -> list[ipaddress.IPv4Address]:
    """Return the older addresses that a newer one leads to."""
    teredo = address.teredo or ()
    nat = [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)] if address in NAT64 else []
    return [each for each in (address.ipv4_mapped, address.sixtofour, *teredo, *nat) if each is not None]


@dataclass(frozen=True, slots=True)
class WebPage:
    address: str
    text: str


class _Fetch:
    """One fetch. It ends at the deadline, whatever the other side does: then its socket is shut."""

    def __init__(self, address_of: Callable[[str, int], str], deadline_s: float) -> None:
        self._address_of, self._deadline_s = address_of, deadline_s
        self._socket: socket.socket | None = None
        self._over = threading.Event()

    def run(self, address: str) -> tuple[str, str, bytes]:
        """Return the last address, its type, and its bytes. Raises ToolError."""
        watch = threading.Timer(self._deadline_s, self._end)
        watch.daemon = True
        watch.start()
        try:
            for _ in range(MOST_REDIRECTS + 1):
                parts = check(address)
                status, headers, body = self._get(parts)
                if status not in REDIRECTS or not headers.get("location"):
                    if status != 200:
                        raise ToolError(f"{parts.hostname} answers with status {status}")
                    return address, headers.get("content-type", ""), body
                after = urljoin(address, headers["location"])
                if parts.scheme == "https" and urlsplit(after).scheme != "https":
                    raise ToolError("the page leads on to an address without encryption")
                address = after
            raise ToolError(f"the page leads on more than {MOST_REDIRECTS} times")
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self._over.is_set():
                raise ToolError(f"the page took more than {self._deadline_s:g} s") from None
            why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
            raise ToolError(f"the page could not be fetched: {why:.200}") from error
        finally:
            watch.cancel()

    def _end(self) -> None:
        self._over.set()
        if (open_ := self._socket) is not None:
            with suppress(OSError):
                open_.shutdown(socket.SHUT_RDWR)

    def _get(self, parts: SplitResult) -> tuple[int, dict[str, str], bytes]:
        host, port = parts.hostname or "", parts.port or SCHEMES[parts.scheme]
        at = self._address_of(host, port)
        if self._over.is_set():
            raise TimeoutError
        connection = http.client.HTTPConnection(host, port, timeout=self._deadline_s)
        self._socket = socket.create_connection((at, port), timeout=self._deadline_s)
        try:
            if parts.scheme == "https":
                self._socket = ssl.create_default_context().wrap_socket(self._socket, server_hostname=host)
            connection.sock = self._socket
            path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._") + (
                f"?{quote(parts.query, safe=QUERY)}" if parts.query else ""
            )
            accept = {"Accept": "text/html,text/plain;q=0.9,*/*;q=0.1", "Accept-Encoding": "identity"}
            connection.request("GET", path, headers={**accept, "User-Agent": "tokamac", "Connection": "close"})
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.getheaders()}
            if answer.status in REDIRECTS:
                return answer.status, headers, b""
            body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise ToolError(f"the page has more than {MOST_BYTES // 10**6} MB")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise ToolError("the page comes compressed, though it was asked for as it is")
            return answer.status, headers, body
        finally:
            connection.close()
            self._socket.close()


QUERY = "/?%:@!$&'()*+,;=~-._[]"


def fetch(
    address: str,
    *,
    resolve: Resolve = resolved,
    public: Callable[[str, int, Resolve], str] = public,
    deadline_s: float = DEADLINE_S,
) -> WebPage:
    """Fetch a page as text. Raises ToolError."""
    last, kind, body = _Fetch(lambda host, port: public(host, port, resolve), deadline_s).run(address)
    mime = kind.partition(";")[0].strip().lower() or "text/html"
    if not mime.startswith(TEXTS):
        raise ToolError(f"the page is {mime:.60}, not text")
    text = _decoded(body, kind)
    text = _read_html(text) if mime in HTML else text
    if not text.strip():
        raise ToolError("there is no text on the page", "It may be made by a script.")
    return WebPage(last, text)


def fetch_picture(address: str, *, deadline_s: float = DEADLINE_S) -> bytes:
    """Fetch a picture's file, of any form. Raises ToolError."""
    _, kind, body = _Fetch(lambda host, port: public(host, port, resolved), deadline_s).run(address)
    if not kind.lower().startswith("image/"):
        raise ToolError(f"what is there is {kind:.60}, not a picture")
    return body


def _decoded(body: bytes, kind: str) -> str:
    named = re.search(r"charset=\"?([\w-]{1,40})", kind)
    meta = _CHARSET.search(body[:4096])
    for name in (named and named[1], meta and meta[1].decode(), "utf-8"):
        with suppress(LookupError):  # of an encoding that is none, or not of text
            if name:
                return body.decode(name, "replace")
    return body.decode("utf-8", "replace")


def _read_html(text: str) -> str:
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(
            command, input=text.encode("utf-8", "replace"), capture_output=True, timeout=READING_S, check=True
        )
    except (subprocess.SubprocessError, OSError):
        raise ToolError("the page could not be read: its HTML is too strange") from None
    return done.stdout.decode("utf-8", "replace")


SKIPPED = frozenset(
    {"script", "style", "noscript", "template", "svg", "iframe", "object", "canvas", "nav", "select", "textarea"}
)
BLOCKS = frozenset(
    {"address", "article", "aside", "blockquote", "body", "div", "dd", "dl", "dt", "fieldset", "figure", "footer", "form",
     "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "html", "li", "main", "ol", "p", "pre", "section", "table", "title",
     "tr", "ul"}
)  # fmt: skip
VOID = frozenset({"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"})
_HIDDEN = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden|font-size\s*:\s*0(?![.\d])", re.IGNORECASE)


class _Text(HTMLParser):
    """The text that a page shows: without scripts, and without what is hidden from who looks at it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.lines = [""]
        self._unseen: list[str] = []  # the elements that are open in one that is not shown
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        hidden = tag in SKIPPED or "hidden" in given or bool(_HIDDEN.search(given.get("style") or ""))
        if self._unseen or hidden:
            if tag not in VOID:
                self._unseen.append(tag)
            return
        if tag in BLOCKS or tag == "br":
            self._break()
        self._pre += tag == "pre"
        if tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            self.lines[-1] += "#" * int(tag[1]) + " "
        elif tag == "li":
            self.lines[-1] += "- "
        elif tag in ("td", "th") and self.lines[-1].strip():
            self.lines[-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        if self._unseen:
            if tag in self._unseen:
                del self._unseen[len(self._unseen) - 1 - self._unseen[::-1].index(tag) :]
            return
        self._pre = max(0, self._pre - (tag == "pre"))
        if tag in BLOCKS:
            self._break()

    def handle_data(self, data: str) -> None:
        if self._unseen:
            return
        if self._pre:
            first, *rest = data.split("\n")
            self.lines[-1] += first
            self.lines += rest
            return
        words = " ".join(data.split())
        if words:
            before = " " if data[:1].isspace() and self.lines[-1] and not self.lines[-1].endswith(" ") else ""
            self.lines[-1] += before + words + (" " if data[-1:].isspace() else "")

    def _break(self) -> None:
        if self.lines[-1]:
            self.lines.append("")


def text_of_html(html: str) -> str:
    reader = _Text()
    reader.feed(html)
    reader.close()
    lines = [line.rstrip() for line in reader.lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


if __name__ == "__main__":
    sys.stdout.buffer.write(text_of_html(sys.stdin.buffer.read().decode("utf-8", "replace")).encode("utf-8", "replace"))
