"""Dialects of calls: a template written anew after each published form is recognised, and what it renders is read back."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.engine.text.test_tools import tokenizer, written
from tokamac.engine import Message, TemplateOptions, ToolCall, ToolSpec
from tokamac.engine.text.stream import ReplyText

WRITE = ToolSpec("write_file", "Writes.", {"type": "object", "properties": {
    "path": {"type": "string"}, "text": {"type": "string"}, "mode": {"type": "integer"}, "more": {"type": "array"},
}})  # fmt: skip
LIST = ToolSpec("list_files", "Lists.", {"type": "object", "properties": {"path": {"type": "string"}}})
ARGUMENTS: dict[str, Any] = {
    "path": "a b.txt",
    "text": '  "é" </x>\n\tit\'s \\n\n',
    "mode": 3,
    "more": [True, None, {"a": 1.5, "b": "c"}],
}
ASKED = Message("user", "Do it.")

# What is around a call in a chat, in words of its own: the families differ in it, and it does not matter here.
CHAT = (
    "{{- '<|system|>' }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ '<|end|>' }}"
    "{%- for message in messages %}"
    "{{- '<|' + message.role + '|>' + message.content }}"
    "{%- if message.tool_calls %}CALLS{% endif %}{{ '<|end|>' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FAMILIES = {
    each["name"]: each
    for each in tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))["family"]
}


def read(model: Any, text: str) -> list[ToolCall]:
    reply = ReplyText(model, calls=model.call_reader(7))
    for token in model.encode(text):
        reply.add(token)
    reply.finish()
    assert reply.answer == ""
    return reply.calls


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rendered_call_is_read_back_as_what_it_was(tmp_path: Path, family: str) -> None:
    form, dialect = FAMILIES[family], FAMILIES[family]["dialect"]
    text = written(form["template"] if "template" in form else CHAT.replace("CALLS", form["calls"]))
    model = tokenizer(tmp_path, text, marks=("<|end|>", "<|assistant|>", *form.get("marks", ())), thinking=False)
    model = model.using(TemplateOptions(tools=(WRITE, LIST)))
    reader = model.call_reader(0)
    assert reader.dialect.name == dialect
    made = [
        ToolCall("write_file", json.dumps(ARGUMENTS), "abcdef123"),
        ToolCall("list_files", '{"path": ""}', "abcdef124"),
    ]
    made = made[: 1 if family == "Llama 3.1" else 2]
    prompt = model.render([ASKED])
    rendered = model.render([ASKED, Message("assistant", "", tool_calls=tuple(made))], reply=False).replace(
        "\ufdd1", ""
    )
    assert rendered.startswith(prompt)
    assert rendered.endswith("<|end|>")
    found = read(model, rendered[len(prompt) :].removesuffix("<|end|>"))
    assert [(each.name, each.values, each.problem) for each in found] == [(each.name, each.values, "") for each in made]


def test_a_template_whose_calls_are_in_no_known_form_takes_no_tools(tmp_path: Path) -> None:
    calls = "{% set f = message.tool_calls[0].function %}{{ f.name }} with {{ f.arguments | tojson }}"
    assert not tokenizer(tmp_path, written(CHAT.replace("CALLS", calls))).takes_tools
