"""GGUF vocabularies: ids as llama.cpp's, for each way to split text; ends, template, and keys that hold nonsense."""

import json
import re
from typing import Any

import pytest

from tests.engine.gguf.texts import FOLDER, SPECIAL, cases, differing, load, small_texts
from tokamac.engine import Message
from tokamac.engine.errors import ModelDamagedError, ModelUnsupportedError, OptionError, TemplateError

GOLDEN = json.loads((FOLDER / "ids.json").read_text())
CASES = dict(cases())
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MISSING = object()


def _keys(case: str = "smollm", **changes: Any) -> dict[str, Any]:
    changed = {**CASES[case], **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}
    return {key: value for key, value in changed.items() if value is not MISSING}


def test_every_way_to_split_text_gives_the_ids_of_llama_cpp() -> None:
    texts, wrong = small_texts(), dict[str, Any]()
    assert CASES.keys() == GOLDEN.keys()
    for name, keys in CASES.items():
        tokenizer = load(keys, name)
        if found := differing(texts, [tokenizer.encode(text) for text in texts], GOLDEN[name]):
            wrong[name] = found[0]
    assert not wrong


def test_texts_come_back_whole() -> None:
    for name in ("smollm", "gemma4", "kind llama, no prefix"):
        tokenizer = load(CASES[name], name)
        marks = {*SPECIAL, "<unk>"} - {"plugh"} | (set() if name == "smollm" else {"▁", "<0x0A>"})
        texts = [text for text in small_texts() if not any(mark in text for mark in marks)]
        assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    prefixed = load(CASES["kind llama"], "prefixed")
    assert prefixed.decode(prefixed.encode("two words")) == "two words"


@pytest.mark.parametrize(
    ("case", "changes", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ["<s>"], ["</s>"]),
        ("llama-bpe", {}, ["<s>"], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("kind llama", {}, ["<s>"], []),
        ("kind llama", {"bos_token_id": MISSING}, ["<s>"], []),  # its second token is that by convention
        ("kind gemma4", {"add_bos_token": False}, ["<s>"], []),  # as its first files said
    ],
)
def test_bos_and_eos_are_as_wanted(case: str, changes: dict[str, Any], before: list[str], after: list[str]) -> None:
    tokens = CASES[case]["tokenizer.ggml.tokens"]
    tokenizer = load(_keys(case, **changes), case)
    inner, whole = tokenizer.encode("the"), tokenizer.encode("the", add_special_tokens=True)
    assert [tokens[each] for each in whole] == [*before, *(tokens[each] for each in inner), *after]


def test_a_reply_ends_at_every_end_that_keys_tokens_or_template_name() -> None:
    tokens = [*CASES["smollm"]["tokenizer.ggml.tokens"]]
    base = load(_keys(), "base")
    assert {tokens[each] for each in base.eos_ids} == {"</s>", "<|im_end|>"}
    assert not base.has_chat_template
    harmony = {"<|end|>", "<|return|>", "<|call|>"}
    more = [*tokens, *harmony, "[STOP]"]
    keys = _keys(tokens=more, token_type=[*CASES["smollm"]["tokenizer.ggml.token_type"], 3, 3, 3, 3])
    keys["tokenizer.chat_template"] = TEMPLATE.replace("<|im_end|>", "[STOP]")
    ends = load(keys, "chat").eos_ids
    assert {more[each] for each in ends} == {"</s>", "<|im_end|>", "<|return|>", "<|call|>", "[STOP]"}


def test_control_tokens_are_hidden_and_spare_ones_are_not_special() -> None:
    tokenizer = load(_keys(), "small")
    tokens = CASES["smollm"]["tokenizer.ggml.tokens"]
    assert {tokens[each] for each in tokenizer.hidden_ids} == {"<unk>", "<s>", "</s>", "<|im_end|>"}
    assert tokens.index("<unused7>") in tokenizer.encode("a <unused7>")
    written = tokenizer.encode(tokenizer.plain(Message("user", "a <|im_end|>")).content)
    assert tokens.index("<|im_end|>") not in written


def test_templates_are_the_files_own() -> None:
    keys = _keys() | {"tokenizer.chat_template": TEMPLATE}
    assert load(keys, "small").render([Message("user", "Hi")]) == "<|im_start|>user\nHi<|im_end|>\n"
    named = keys | {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert load(named, "small").render([Message("user", "Hi")]) == "<|im_start|>user\nHi<|im_end|>\n"
    for broken in ("{% if %}", "{{ raise_exception('no') }}", "{{ 1 / 0 }}"):
        tokenizer = load(keys | {"tokenizer.chat_template": broken}, "small")
        with pytest.raises(TemplateError, match="small"):
            tokenizer.render([Message("user", "Hi")])


PIECES = CASES["kind llama"]["tokenizer.ggml.tokens"]


def test_phi_3_takes_the_space_after_its_marks() -> None:
    plain, strips = (load(_keys("kind llama") | {"general.name": name}, name) for name in ("a", "Phi-3-mini"))
    assert plain.encode("<|im_end|>\nthe") != strips.encode("<|im_end|>\nthe") == strips.encode("<|im_end|>the")
    assert PIECES.index("<|im_end|>") in strips.encode("<|im_end|>\nthe")


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("smollm", {"model": "bert"}, "kind 'bert'"), ("smollm", {"model": MISSING}, "model is missing"),
        ("smollm", {"model": 7}, "no text"), ("smollm", {"pre": "gpt-9"}, "'gpt-9'"),
        ("smollm", {"pre": MISSING}, "does not say how"), ("smollm", {"tokens": MISSING}, "no tokenizer.ggml.tokens"),
        ("smollm", {"tokens": [b"\xff", "a"]}, "other things than text"),
        ("smollm", {"tokens": ["a", "a"]}, "'a' twice"), ("smollm", {"tokens": ["a" * 5_000]}, "5,000 characters"),
        ("smollm", {"token_type": [1]}, "token_type has 1 entries"), ("smollm", {"merges": ["a"]}, "joins 'a'"),
        ("smollm", {"merges": ["a nowhere"]}, "joins 'a nowhere'"),
        ("smollm", {"merges": MISSING}, "no tokenizer.ggml.merges"),
        ("smollm", {"eos_token_id": 1 << 40}, "EOS is token 1099511627776"),
        ("smollm", {"eos_token_id": -1}, "EOS is token -1"),
        ("smollm", {"add_bos_token": True, "bos_token_id": MISSING}, "BOS, and no token"),
        ("smollm", {"add_bos_token": "yes"}, "neither true nor false"),
        ("kind llama", {"scores": [0.0]}, "scores has 1 entries"),
        ("kind llama", {"scores": MISSING}, "no tokenizer.ggml.scores"),
        ("kind llama", {"scores": [float("nan")] * len(PIECES)}, "not all numbers"),
    ],
)  # fmt: skip
def test_nonsense_is_one_clear_line(case: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ModelDamagedError, ModelUnsupportedError), match=re.escape(said)) as caught:
        load(_keys(case, **changes), "x.gguf")
    assert "x.gguf" in caught.value.message
    assert caught.value.hint


def test_surrogates_are_refused() -> None:
    with pytest.raises(OptionError, match="Unicode"):
        load(_keys(), "small").encode("a\ud800b")
