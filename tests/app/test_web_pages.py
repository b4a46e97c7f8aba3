"""Web pages that are attached: read as they are seen, from public addresses alone, and bounded."""

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import pytest

from tokamac.app.tools import web
from tokamac.app.tools.calls import ToolError

PAGE = """<html><head><title>T</title><script>HACKED</script></head><body><h1>A &amp; B</h1><p>one  two<br>three</p>
<ul><li>x<li>y</ul><div style="display: none">HACKED<b>HACKED</b></div><p hidden>HACKED</p><pre>a
  b</pre><table><tr><td>1<td>2</table></body>"""


class Site(http.server.BaseHTTPRequestHandler):
    """Answers by its path."""

    asked: ClassVar[list[str]] = []
    may_end: ClassVar[threading.Event]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind, _, rest = self.path[1:].partition("/")
        if kind == "slow":
            self.may_end.wait()
        self.send_response(302 if kind == "to" else 200)
        self.send_header("Content-Type", "image/png" if kind == "binary" else "text/html; charset=utf-8")
        if kind == "to":
            self.send_header("Location", rest)
        if kind == "packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        with suppress(OSError):  # nobody reads all of it
            self.wfile.write(b"<p>x" * (2 << 20) if kind == "large" else PAGE.encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@contextmanager
def site_on_this_machine() -> Iterator[int]:
    """Yield the port of a site."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.daemon_threads, server.block_on_close = True, False
    Site.may_end = threading.Event()
    Site.asked.clear()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        Site.may_end.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://[::1]:{port}/", "http://0.0.0.0:{port}/",
     "http://2130706433:{port}/", "http://0x7f.1:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://10.0.0.1/",
     "http://169.254.169.254/latest/meta-data", "http://192.168.0.1/", "http://[fe80::1]/", "http://[fd00::1]/",
     "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/", "http://224.0.0.1/", "http://100.64.0.1/",
     "file:///etc/passwd", "ftp://a.b/", "http://user:pw@a.b/", "http://", "http://a b/", "http://a.b:99999/",
     "javascript:alert(1)", f"http://a.b/{'x' * 3000}", "http://a.b\nc/"],
)  # fmt: skip
def test_no_private_address_and_none_that_is_no_web_address_is_asked(address: str) -> None:
    with site_on_this_machine() as port, pytest.raises(ToolError, match=r"only public|can't be found|web address"):
        web.fetch(address.replace("{port}", str(port)))
    assert Site.asked == []


@pytest.fixture
def site() -> Iterator[Callable[..., web.WebPage]]:
    """Fetches from a site on this machine, whose own name alone counts as public."""
    with site_on_this_machine() as port:

        def public(host: str, port: int, resolve: web.Resolve) -> str:
            return "127.0.0.1" if host == "site.test" else web.public(host, port, resolve)

        def fetch(path: str, **more: Any) -> web.WebPage:
            return web.fetch(f"http://site.test:{port}/{path}", public=public, **more)

        yield fetch


def test_a_page_is_text_without_what_it_hides(site: Callable[..., web.WebPage]) -> None:
    assert site("page").text == "T\n# A & B\none two\nthree\n- x\n- y\na\n  b\n1 | 2"


@pytest.mark.parametrize(
    ("path", "why"),
    [("to/http://127.0.0.1/", "only public"), ("to/http://localhost/", "only public"), ("to/", "status 302"),
     ("to//to//to//to//to//to//to//to/x", "more than 5 times"), ("to/file:///etc/passwd", "no web address"),
     ("large", "more than 4 MB"), ("binary", "image/png"), ("packed", "compressed"), ("slow", "took more than")],
)  # fmt: skip
def test_a_page_that_leads_away_or_has_no_end_is_refused(site: Callable[..., web.WebPage], path: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        site(path, **({"deadline_s": 0.5} if path == "slow" else {}))
