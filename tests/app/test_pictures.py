"""Pictures on their way through the app: files on the command line, blocks of clients, what a chat keeps."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.serve.serving import Served, serving
from tests.engine.vision.test_families import build
from tests.golden.vision import picture
from tokamac.app.backend.protocol import Generate, decode_request, encode
from tokamac.app.chat.attachments import AttachError, Draft, dropped, read_named, whole
from tokamac.app.chat.conversation import Turn
from tokamac.app.chat.conversation import messages as told_of
from tokamac.engine import Engine, Message, Sampling

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
    assert (status, told["message"]["content"], told["prompt_eval_count"]) == (
        200,
        alone.text,
        alone.metrics.prompt_tokens,
    )
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
