"""Pictures on their way through the app: files on the command line, blocks of clients, what a chat keeps."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.serve.serving import Served, serving
from tests.engine.vision.test_families import build
from tests.golden.vision import picture
from tokamac.app import cli
from tokamac.app.backend.protocol import Generate, decode_request, encode
from tokamac.app.chat.attachments import AttachError, Draft, dropped, pasted_picture, price_text, read_named, whole
from tokamac.app.chat.conversation import Turn
from tokamac.app.chat.conversation import messages as told_of
from tokamac.app.chat.external_programs import NotTakenError, copied_picture
from tokamac.app.serve.fetched import with_pictures
from tokamac.app.serve.request import RequestError
from tokamac.app.store.values import Attachment, ToolResult, pictures_of
from tokamac.engine import Engine, Message, Sampling
from tokamac.engine.events import ToolCall
from tokamac.engine.vision.cost import PicturePrice

pytest.importorskip("PIL")
DATA = base64.b64encode(picture("photo")).decode()
TEXT = {"type": "text", "text": "what is it?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sees") / "model"
    build("idefics3", folder)
    return folder


@pytest.fixture(scope="module")
def alone(model: Path) -> Any:
    with Engine.load(model, prompt_cache=None) as engine:
        asked = [Message("user", "what is it?", images=(picture("photo"),))]
        return engine.ask(asked, Sampling(temperature=0.0, max_tokens=8))


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(str(model), tmp_path_factory.mktemp("log") / "log") as found:
        yield found


def test_clients_blocks_are_the_same_picture(served: Served, alone: Any) -> None:
    url, most = f"data:image/png;base64,{DATA}", {"max_tokens": 8, "temperature": 0}
    chat = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, TEXT]}
    status, told = served.ask("/v1/chat/completions", {"messages": [chat], **most})
    assert (status, told["choices"][0]["message"]["content"]) == (200, alone.text), told
    assert told["usage"]["prompt_tokens"] == alone.metrics.prompt_tokens
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
    status, told = served.ask("/v1/messages", {"messages": [{"role": "user", "content": [block, TEXT]}], **most})
    assert (status, told["content"][0]["text"]) == (200, alone.text), told
    parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "what is it?"}]
    asked = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 8, "temperature": 0}
    status, told = served.ask("/v1/responses", asked)
    assert (status, told["output"][0]["content"][0]["text"]) == (200, alone.text), told
    own = {"role": "user", "content": "what is it?", "images": [DATA]}
    options = {"temperature": 0, "num_predict": 8}
    status, told = served.ask("/api/chat", {"messages": [own], "stream": False, "options": options})
    assert (status, told["message"]["content"]) == (200, alone.text)
    assert told["prompt_eval_count"] == alone.metrics.prompt_tokens
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    turns = [("user", [TEXT]), ("assistant", [call]), ("user", [result])]
    said = [{"role": role, "content": content} for role, content in turns]
    status, told = served.ask("/v1/messages", {"messages": said, **most})
    assert (status, told["usage"]["input_tokens"] > alone.metrics.prompt_tokens) == (200, True), told


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", "data:image/png,AA", "data:image/png;base64,AA==", "file:///etc/x"]
)
def test_nothing_is_fetched_and_what_is_no_picture_is_a_400(served: Served, url: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    status, told = served.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert (status, told["error"]["param"]) == (400, "messages[0].content[0].image_url.url")


def test_a_server_that_may_fetches_pictures_from_public_addresses_alone() -> None:
    url, asked = "https://a.org/x.png", []
    block, source = {"type": "input_image", "image_url": url}, {"type": "image", "source": {"type": "url", "url": url}}
    nested = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    given = {"messages": [{"content": [nested, source]}], "input": [block], "tools": [block]}
    made = with_pictures(given, lambda address, **_: asked.append(address) or picture("alpha"))
    (first, second), whole = made["messages"][0]["content"], made["input"][0]["image_url"]
    assert (asked, first["image_url"], made["tools"]) == ([url], {"url": whole, "detail": "low"}, [block])
    assert base64.b64decode(second["source"]["data"]) == base64.b64decode(whole.partition(",")[2]) == picture("alpha")
    with pytest.raises(RequestError, match="only public ones are fetched"):
        with_pictures({"input": [{**block, "image_url": "http://127.0.0.1/a.png"}]})


# What each tool writes: AppleScript's form as recorded on macOS, the others the file itself.
TOOLS = {
    "osascript": ("", f"printf '%s\\n' '«data PNGf{picture('alpha').hex().upper()}»'"),
    "wl-paste": ("WAYLAND_DISPLAY", 'cat "$0.png"'),
    "xclip": ("DISPLAY", 'cat "$0.png"'),
}


@pytest.mark.parametrize("name", TOOLS)
def test_the_clipboards_picture_is_attached_by_its_hash(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs, script = TOOLS[name]
    for each in ("SSH_CONNECTION", "WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if needs:
        monkeypatch.setenv(needs, "x")
    tool = tmp_path / name
    (tmp_path / f"{name}.png").write_bytes(picture("alpha"))
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    made = pasted_picture(copied_picture())
    assert pictures_of((made,))[0].data == picture("alpha")
    assert re.fullmatch(r"clipboard-[0-9a-f]{6}\.png", made.name)
    for wrong in ("exit 1", "echo no", "printf '«data TEXT00»'") if name == "osascript" else ("exit 1", "true"):
        tool.write_text(f"#!/bin/sh\n{wrong}\n")
        with pytest.raises(NotTakenError, match="holds no picture"):
            copied_picture()
    with pytest.raises(AttachError, match="is not a picture"):
        pasted_picture(b"no")
    monkeypatch.setenv("SSH_CONNECTION", "x")
    with pytest.raises(NotTakenError, match="over SSH"):
        copied_picture()


def test_a_price_says_what_is_seen_of_a_picture() -> None:
    told = price_text(PicturePrice((3840, 2160), (1568, 882), 1196, 1.5, 0.6))
    assert told == "3,840 × 2,160, seen at 1,568 × 882, 1,196 tokens, about 2.1 s"
    assert price_text(PicturePrice((64, 64), (64, 64), 4)) == "64 × 64, 4 tokens"


def test_a_tools_picture_is_kept_and_told_in_words_to_a_model_that_reads_text_alone() -> None:
    shown = Attachment("a", DATA, "picture")
    result = ToolResult(ToolCall("look"), "here", attachments=(shown,))
    assert result.told_to(sees=True).as_message.pictures[0].data == picture("photo")
    blind = result.told_to(sees=False).as_message
    assert (blind.content, blind.images) == ("here\n[a picture, which this model can't see]", ())


def test_inspect_says_what_a_picture_costs(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(model), "--json", "--table"]) == 0
    found = json.loads(capsys.readouterr().out)["picture_tokens"]
    assert 0 < found["least"] <= found["tokens"] <= found["most"]
    assert cli.main(["inspect", str(model)]) == 0
    assert f"{found['tokens']:,} tokens, of 1,024 × 768 pixels; {found['least']} to " in capsys.readouterr().out


def test_a_chat_keeps_a_picture_as_an_attachment_and_sends_it_beside_the_words(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture("photo"))
    (tmp_path / "b.png").write_text("no picture")
    kept = read_named("a.png", tmp_path)
    assert (kept.name, kept.kind, kept.text) == ("a.png", "picture", DATA)
    assert (Draft("hi", (kept,)).whole, whole("", (kept,))) == ("hi", "")
    (asked,) = told_of("", [Turn("what is it?", attachments=(kept,))])
    sent = decode_request(encode(Generate(1, (asked,), Sampling())))
    assert isinstance(sent, Generate)
    assert (sent.messages[0].content, sent.messages[0].pictures[0].data) == ("what is it?", picture("photo"))
    spaced = tmp_path / "a b.png"
    spaced.write_bytes(picture("photo"))
    drops = (
        str(spaced).replace(" ", "\\ "),
        f"'{spaced}'",
        spaced.as_uri(),
        f"{tmp_path}/none.png",
        "a.png",
        "see /a.png",
    )
    assert [dropped(each) for each in drops] == [str(spaced)] * 3 + [None] * 3
    with pytest.raises(AttachError, match="not a picture"):
        read_named("b.png", tmp_path)
