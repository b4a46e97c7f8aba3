"""A folder's tokenizer read without transformers is the one that transformers reads; what only it can read is left to it."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from tokamac.assets import asset_path
from tokamac.engine.text.tokenizer import check_growth, load_tokenizer
from tokamac.engine.text.tokenizer_file import FileTokenizer, read_tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "<pad>")
WORDS = "The cache keeps keys and values; it's read 1234 times. Der Rest, naïve 東京 👩‍👩‍👧 don't\n\n  and  more\t"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = (
    WORDS, "", " ", "<s>Hi<|im_end|> there", "a  10", "\n<|im_start|>user\nno<pad>", "e\u0301 \u0130 \ufb01",
    "<img>x<fake>",
)  # fmt: skip

# What a tokenizer_config.json says beside {eos_token}, and further files of the folder.
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "plain": ({}, {}),
    "no class": ({"tokenizer_class": None}, {}),
    "qwen2": (
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "unk_token": None, "pad_token": "<pad>"},
        {"config.json": '{"model_type": "qwen2"}'},
    ),
    "llama": (
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True},
        {"config.json": '{"model_type": "llama"}'},
    ),
    "tokens as objects": ({"bos_token": {"__type": "AddedToken", "content": "<s>"}, "pad_token": "<pad>"}, {}),
    "further": ({"additional_special_tokens": ["<|im_start|>", "<img>"], "bos_token": None}, {}),
    "further, by name": ({"extra_special_tokens": {"image_token": "<img>"}, "audio_token": "<pad>"}, {}),
    "map": ({}, {"special_tokens_map.json": '{"bos_token": {"content": "<s>"}, "unk_token": "<fake>"}'}),
    "listed": (
        {"added_tokens_decoder": {"0": {"content": "<|im_start|>", "special": True}}},
        {"special_tokens_map.json": '{"bos_token": "<s>"}'},
    ),
    "template": ({"chat_template": "{{ messages }}"}, {}),
    "templates": ({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}, {}),
    "template file": ({"chat_template": "old"}, {"chat_template.jinja": "new"}),
    "template files": ({}, {"chat_template.jinja": "new", "additional_chat_templates/tool_use.jinja": "tools"}),
}


def write(
    folder: Path, name: str, pre_tokenizer: PreTokenizer | None = None, normalizer: Normalizer | None = None
) -> Path:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(QWEN2), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizer or normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel() if pre_tokenizer is None else decoders.Metaspace()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.enable_padding(pad_token="<pad>", pad_id=3)
    tokenizer.enable_truncation(4)
    config, files = CONFIGS[name]
    for path, text in {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
        ),
        **files,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return folder


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def ours(folder: Path) -> FileTokenizer:
    found = read_tokenizer(folder, check_growth(folder / "tokenizer.json"))
    assert found is not None
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_it_is_transformers_tokenizer(tmp_path: Path, name: str) -> None:
    own, reference = ours(write(tmp_path, name)), theirs(tmp_path)
    assert own.get_vocab() == reference.get_vocab()
    assert len(own) == len(reference)
    assert own.special_tokens_map == reference.special_tokens_map
    assert own.all_special_tokens == reference.all_special_tokens
    assert own.all_special_ids == reference.all_special_ids
    assert own.eos_token_id == reference.eos_token_id
    assert own.get_added_vocab() == reference.get_added_vocab()
    assert {token.content: token.special for token in own.added_tokens_decoder.values()} == {
        token.content: token.special for token in reference.added_tokens_decoder.values()
    }
    assert own.chat_template == reference.chat_template
    for tools in (None, [{}]) if own.chat_template else ():
        assert own.get_chat_template(tools=tools) == reference.get_chat_template(tools=tools)
    for text in TEXTS:
        for special in (False, True):
            assert own.backend_tokenizer.encode(text, add_special_tokens=special).ids == reference.encode(
                text, add_special_tokens=special
            )


@given(st.text(max_size=60))
def test_the_guides_ids_are_transformers(text: str) -> None:
    own, reference = GUIDE
    assert own.backend_tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(
        text, add_special_tokens=False
    )


GUIDE = ours(asset_path("guide", "model")), theirs(asset_path("guide", "model"))


@pytest.mark.parametrize(
    ("pre_tokenizer", "normalizer"),
    [
        (pre_tokenizers.Metaspace(), None),
        (pre_tokenizers.ByteLevel(), normalizers.Prepend("▁")),
        (pre_tokenizers.Whitespace(), None),
    ],
)
def test_what_transformers_makes_by_rules_of_its_own_is_left_to_it(
    tmp_path: Path, pre_tokenizer: PreTokenizer, normalizer: Normalizer | None
) -> None:
    folder = write(tmp_path, "plain", pre_tokenizer, normalizer)
    assert read_tokenizer(folder, check_growth(folder / "tokenizer.json")) is None
    loaded, reference = load_tokenizer(folder, {}, "it"), theirs(folder)
    for text in TEXTS[:4]:
        assert loaded.encode(text, add_special_tokens=True) == reference.encode(text)


def test_what_the_file_does_not_say_is_left_to_transformers(tmp_path: Path) -> None:
    assert read_tokenizer(tmp_path, check_growth(tmp_path / "tokenizer.json")) is None
    file = write(tmp_path, "plain") / "tokenizer_config.json"
    for asked in ({"split_special_tokens": True}, {"added_tokens_decoder": {"7": {"content": "<new>"}}}):
        file.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **asked}))
        assert read_tokenizer(tmp_path, check_growth(tmp_path / "tokenizer.json")) is None, asked
