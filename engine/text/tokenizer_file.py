"""A folder's tokenizer as its tokenizer.json says, read by the tokenizers library alone."""

# transformers takes seconds to import. For a tokenizer.json that says everything, it adds only the special tokens and
# the chat template that lie beside it. Where its classes build another tokenizer than the file's (SentencePiece's
# spaces), or there is no such file, transformers still reads the folder.

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..files import read_text

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATES = "additional_chat_templates"  # a folder of further templates, by name

# Steps that transformers makes anew by its own rules.
REMADE = frozenset({"Metaspace", "Prepend"})
# What a tokenizer_config.json may ask of the file's tokenizer that is not in the file.
ASKS = ("split_special_tokens", "fix_mistral_regex", "add_prefix_space", "auto_map")


class FileTokenizer:
    """What ``Tokenizer`` needs of transformers' classes, under their names; texts are encoded by ``backend_tokenizer`` itself."""

    is_fast = True

    def __init__(
        self, backend: Tokenizer, config: Mapping[str, Any], chat_template: str | dict[str, str] | None
    ) -> None:
        self.backend_tokenizer = backend
        self.init_kwargs = config
        self.chat_template = chat_template
        padding = backend.padding
        self.special_tokens_map = dict(
            _named(config if padding is None else {"pad_token": padding["pad_token"], **config})
        )
        self.all_special_tokens = list(dict.fromkeys([*self.special_tokens_map.values(), *_further(config)]))
        unknown = [text for text in self.all_special_tokens if backend.token_to_id(text) is None]
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in unknown])
        backend.no_padding()
        backend.no_truncation()

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def all_special_ids(self) -> list[int | None]:
        return [self.backend_tokenizer.token_to_id(text) for text in self.all_special_tokens]

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens_map.get("eos_token")
        return None if text is None else self.backend_tokenizer.token_to_id(text)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in sorted(self.added_tokens_decoder.items())}

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab()
        return vocabulary

    def get_chat_template(self, *, tools: Sequence[object] | None = None) -> str:
        """Return the template for tools if there is one of its own. Raises ValueError without a default one."""
        templates = self.chat_template
        if isinstance(templates, dict):
            templates = templates.get("tool_use" if tools and "tool_use" in templates else "default")
        if templates is None:
            raise ValueError("there is no default chat template")
        return templates


def read_tokenizer(folder: Path, parts: Mapping[str, Any] | None) -> FileTokenizer | None:
    """Return the tokenizer of tokenizer.json; None where transformers must read the folder.

    parts: what that file says, None where it says nothing. Raises OSError, ValueError, and what the Rust library raises for a
    damaged file.
    """
    if parts is None:
        return None
    config = _read_json(folder / "tokenizer_config.json")
    if not _says_all(parts, config):
        return None
    if "added_tokens_decoder" not in config:
        config |= _read_json(folder / "special_tokens_map.json")
    return FileTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), config, _chat_template(folder, config))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(file))
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no object")
    return found


def _says_all(parts: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    if any(config.get(name) for name in ASKS):
        return False
    model, kinds = (
        parts.get("model"),
        set(_kinds([parts.get(name) for name in ("normalizer", "pre_tokenizer", "decoder")])),
    )
    if not isinstance(model, dict) or model.get("type") != "BPE" or kinds & REMADE:
        return False
    added = {each.get("content") for each in parts.get("added_tokens") or () if isinstance(each, dict)}
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict) and not {_text(each) for each in listed.values()} <= added:
        return False
    return "ByteLevel" in kinds or bool(model.get("byte_fallback"))


def _kinds(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part["type"]
        yield from _kinds(list(part.values()))
    elif isinstance(part, list):
        for each in part:
            if isinstance(each, dict | list):
                yield from _kinds(each)


def _text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in (*NAMED, *(key for key in config if key.endswith("_token") and key not in NAMED)):
        if (text := _text(config.get(name))) is not None:
            yield name, text
    if isinstance(more := config.get("extra_special_tokens"), dict):
        yield from ((name, text) for name, value in more.items() if (text := _text(value)) is not None)


def _further(config: Mapping[str, Any]) -> Iterator[str]:
    listed = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    if isinstance(listed, list):
        yield from (text for each in listed if (text := _text(each)) is not None)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    found: dict[str, str] = {}
    for name, file in (
        ("default", folder / "chat_template.jinja"),
        *((each.stem, each) for each in sorted((folder / TEMPLATES).glob("*.jinja"))),
    ):
        if file.is_file():
            found[name] = read_text(file)
    if not found:
        stored = config.get("chat_template")
        if isinstance(stored, list):
            return {each["name"]: each["template"] for each in stored}
        return stored if isinstance(stored, str) else None
    return found["default"] if found.keys() == {"default"} else found
