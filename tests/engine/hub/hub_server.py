"""A small local server that speaks the hub's protocol: model info, HEAD and GET of files with ETag, X-Repo-Commit and Range."""

import hashlib
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from tests.waiting import PATIENCE_S

COMMIT = "a" * 40
NEWER = "b" * 40
CLIENT = Path(__file__).parent / "client.py"


@dataclass
class Hub:
    """What the server holds, how it misbehaves, and what it was asked."""

    repo: str = "org/tiny"
    files: dict[str, bytes] = field(default_factory=dict)
    commit: str = COMMIT
    absent: set[str] = field(default_factory=set)  # listed, but 404
    hashes: dict[str, str] = field(default_factory=dict)  # what is said of a file's contents, where that is not so
    gated: bool = False
    token: str = "hf_good"
    status: int = 0  # answer every request with this
    ignores_range: bool = False
    stall_at: int | None = None  # send so many bytes of a weights file, then hold the line until ``resume``
    break_at: list[int] = field(
        default_factory=list
    )  # send so many bytes of a weights file, then drop the line; once each
    resume: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    sent: dict[str, int] = field(default_factory=dict)  # bytes by file name
    listed: list[dict[str, Any]] = field(default_factory=list)  # what /api/models lists, as the hub says it
    configs: dict[str, bytes] = field(default_factory=dict)  # config.json of those, by id
    url: str = ""

    def fetched(self) -> set[str]:
        """Names of the files that were asked for by GET or HEAD."""
        return {path.partition("/resolve/")[2].partition("/")[2] for _, path, _ in self.requests if "/resolve/" in path}

    def gets(self, name: str) -> list[str | None]:
        """The Range headers of the GETs of a file, in order."""
        return [asked for method, path, asked in self.requests if method == "GET" and path.endswith("/" + name)]


@cache
def safetensors(nbytes: int, seed: int = 1) -> bytes:
    """Return a whole file of one tensor of so many bytes, none alike."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    places = np.arange(nbytes)
    values = (places * 31 * seed + places // 251) % 256
    return struct.pack("<Q", len(header)) + header + values.astype(np.uint8).tobytes()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf", "tokenizer.json"))


def etag(name: str, content: bytes) -> str:
    if is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)  # how soon it ends when asked to
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        hub.resume.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path, _, query = self.path.partition("?")
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.status:
            self._fail(self.hub.status, "")
        elif path in ("", "/"):
            self._send_json({})
        elif path == "/api/models":
            self._list(parse_qs(query))
        elif (content := self.hub.configs.get(path.strip("/").removesuffix("/resolve/main/config.json"))) is not None:
            self._send_bytes(content)
        elif path.startswith(f"/api/models/{self.hub.repo}"):
            self._api(path)
        elif path.startswith(f"/{self.hub.repo}/resolve/"):
            self._file(path.partition("/resolve/")[2].partition("/")[2], body=body)
        else:
            self._fail(401, "RepoNotFound")

    def _api(self, path: str) -> None:
        if "/revision/" in path and path.rpartition("/")[2] not in ("main", self.hub.commit):
            self._fail(404, "RevisionNotFound")
            return
        siblings = []
        for name, content in self.hub.files.items():
            entry = {
                "rfilename": name,
                "size": len(content),
                "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
            }
            if is_large(name):
                entry["lfs"] = {"sha256": etag(name, content), "size": len(content), "pointerSize": 134}
            if name in self.hub.hashes and is_large(name):
                entry["lfs"]["sha256"] = self.hub.hashes[name]
            elif name in self.hub.hashes:
                entry["blobId"] = self.hub.hashes[name]
            siblings.append(entry)
        self._send_json({"_id": "1", "id": self.hub.repo, "sha": self.hub.commit, "siblings": siblings})

    def _list(self, query: dict[str, list[str]]) -> None:
        """Answer as the hub does: each that has the words in its id and all of the tags."""
        words, tags = query.get("search", [""])[0].lower().split(), set(query.get("filter", []))
        kinds = query.get("pipeline_tag", [])
        found = [
            each
            for each in self.hub.listed
            if all(word in each["id"].lower() for word in words)
            and tags <= set(each["tags"])
            and (not kinds or each.get("pipeline_tag") in kinds)
        ]
        self._send_json(found)

    def _send_json(self, value: Any) -> None:
        self._send_bytes(json.dumps(value).encode())

    def _send_bytes(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _file(self, name: str, *, body: bool) -> None:
        hub = self.hub
        if hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
            self._fail(403 if self.headers.get("Authorization") else 401, "GatedRepo")
            return
        if name in hub.absent or name not in hub.files:
            self._fail(404, "EntryNotFound")
            return
        content = hub.files[name]
        asked = self.headers.get("Range")
        begin = int(asked.removeprefix("bytes=").split("-")[0]) if asked and not hub.ignores_range else 0
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("ETag", f'"{etag(name, content)}"')
        self.send_header("X-Repo-Commit", hub.commit)
        if is_large(name):
            self.send_header("X-Linked-Etag", f'"{etag(name, content)}"')
            self.send_header("X-Linked-Size", str(len(content)))
        self.end_headers()
        if body:
            self._send(name, content, begin)

    def _send(self, name: str, content: bytes, begin: int) -> None:
        hub, weights = self.hub, name.endswith(".safetensors")
        end = len(content)
        if weights and hub.break_at:
            end = hub.break_at.pop(0)
        elif weights and hub.stall_at is not None:
            end = hub.stall_at
        try:
            self.wfile.write(content[begin:end])
            hub.sent[name] = hub.sent.get(name, 0) + end - begin
            if end < len(content) and hub.stall_at is not None:
                hub.stalled.set()
                hub.resume.wait(PATIENCE_S)
        except OSError:
            pass  # the client has gone
        if end < len(content):
            self.close_connection = True

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()
