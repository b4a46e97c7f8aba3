"""History never blocks: any conversation is rendered, whatever its template refuses, and every word of it is there."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.text.test_dialects import FAMILIES
from tests.engine.text.test_tools import CHANNELS, tokenizer, written
from tokamac.engine import Message, TemplateOptions, ToolCall, ToolSpec
from tokamac.engine.text.tokenizer import Tokenizer

TEMPLATES = {
    each["name"]: each["text"]
    for each in tomllib.loads(Path(__file__).with_name("histories.toml").read_text(encoding="utf-8"))["template"]
}
TEMPLATES |= {name: each["template"] for name, each in FAMILIES.items() if "template" in each}
TOOLS = (ToolSpec("look"), ToolSpec("find"))
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "model", "observation", "narrator"])


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Message], list[str]]:
    """Return messages in any order of roles, and the words that are in them."""
    messages: list[Message] = []
    words: list[str] = []

    def word() -> str:
        words.append(f"word{len(words)}.")
        return words[-1]

    for role in draw(st.lists(ROLES, min_size=1, max_size=8)):
        calls = []
        if role == "assistant":
            for _ in range(draw(st.integers(0, 2))):
                broken = draw(st.booleans())
                arguments = f'{{"a": "{word()}"' if broken else f'{{"a": "{word()}"}}'
                calls.append(ToolCall("look", arguments, f"call{len(words)}", problem="it was cut" if broken else ""))
        known = [call.id for message in messages for call in message.tool_calls] or [""]
        answered = draw(st.sampled_from([*known, "nobody"])) if role in ("tool", "observation") else ""
        messages.append(Message(role, word(), tool_calls=tuple(calls), tool_call_id=answered, name="look"))  # type: ignore[arg-type]
    return messages, words


@pytest.fixture(scope="module", params=TEMPLATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    text = written("".join(TEMPLATES[request.param].split("\n")))
    marks = CHANNELS if request.param == "gpt-oss" else ()
    made = tokenizer(tmp_path_factory.mktemp("model"), text, marks=marks, thinking=False)
    return made.using(TemplateOptions(tools=TOOLS)) if made.takes_tools else made


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_every_word_of_a_talk_reaches_the_model(model: Tokenizer, told: tuple[list[Message], list[str]]) -> None:
    messages, words = told
    text = model.render(messages).replace("\ufdd1", "")
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(("given", "role"), [
    ("developer", "system"), ("Model", "assistant"), ("ipython", "tool"), ("human", "user"), ("narrator", "user"),
])  # fmt: skip
def test_other_names_of_roles_are_read(given: Any, role: str) -> None:
    assert Message(given, "a").role == role


def test_thinking_goes_back_only_where_the_template_has_a_place_for_it(tmp_path: Path) -> None:
    told = [Message("user", "a"), Message("assistant", "<think>\nHm.\n</think>\n\nB."), Message("user", "c")]
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert tokenizer(tmp_path, plain).render(told) == "<user>a<assistant>B.<user>c"
    with_thoughts = plain.replace("{{ m.content }}", "{{ m.reasoning_content }}|{{ m.content }}")
    assert tokenizer(tmp_path, with_thoughts).render(told) == "<user>|a<assistant>Hm.|B.<user>|c"
    assert "Use <think>" in tokenizer(tmp_path, plain).render([*told[:1], Message("assistant", "Use <think>")])
