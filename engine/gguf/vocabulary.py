"""A GGUF file's vocabulary: the tokenizer that gives a text the ids that llama.cpp gives it, its chat template and ends."""

# A file names how its model splits text, and llama.cpp's source (src/llama-vocab.cpp) says what the names stand for. One
# that is not known is refused: what is nearly right tokenizes most texts rightly, and no one sees where it does not.

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokamac.assets import asset_path

from ..errors import ModelDamagedError, ModelUnsupportedError, panics_as_errors

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type: found in a text before it is split
SPACE = "▁"  # a space, in the tokens of SentencePiece
LONGEST_TOKEN = 1_024  # characters; runs of spaces are the longest, of some hundred. Its ways to divide are all tried.
# Kinds of tokenizers: SentencePiece's, byte-level BPE, and BPE on SentencePiece's texts.
SENTENCE_PIECES, BYTE_LEVEL, SPACED = "llama", "gpt2", "gemma4"

# Tokens that end a reply in any model, as in llama.cpp: many files name one end of several. Not its "</s>", which is
# HTML in Gemma's vocabulary.
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
})  # fmt: skip
# Beside one of each of these, <|end|> ends a message only.
MESSAGE_END, REPLY_ENDS, CALL_ENDS = "<|end|>", {"<|return|>", "<|flush|>"}, {"<|call|>", "<|calls|>"}

NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}  # ids where a file of SentencePiece's names none
STRIPPING = ("phi-3", "phi3")  # models whose control tokens take the white space after them


@dataclass(frozen=True)
class Splitting:
    """How text is split before pairs are joined, as ``tokenizer.ggml.pre`` names it."""

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def write_tokenizer(metadata: Mapping[str, Any], folder: Path, name: str) -> None:
    """Write a GGUF file's tokenizer, from its keys as plain values, as the files that a Hugging Face folder has of one.

    Raises:
        ModelDamagedError: keys that are missing, contradict each other or hold nonsense.
        ModelUnsupportedError: a kind of tokenizer, or of splitting, that is not known here.
    """
    found = _Vocabulary(metadata, name)
    with panics_as_errors():
        try:
            found.tokenizer().save(str(folder / "tokenizer.json"), pretty=False)
        except (OSError, ModelDamagedError, ModelUnsupportedError):
            raise
        except Exception as error:  # the library raises bare ones
            raise found.damaged(" ".join(str(error).split())[:200]) from error
    for file, values in (("tokenizer_config", found.config()), ("generation_config", {"eos_token_id": found.ends()})):
        (folder / f"{file}.json").write_text(json.dumps(values), encoding="utf-8")


class _Vocabulary:
    def __init__(self, metadata: Mapping[str, Any], name: str) -> None:
        self._metadata, self._name = metadata, name
        self._kind = self._text("tokenizer.ggml.model", required=True)
        if self._kind not in (SENTENCE_PIECES, BYTE_LEVEL, SPACED):
            raise ModelUnsupportedError(
                f"{name} has a tokenizer of the kind {self._kind!r}, which is not known here",
                "Use a model whose kind is gpt2 or llama.",
            )
        self._tokens = [token or f"[EMPTY_{at}]" for at, token in enumerate(self._array("tokens", str))]
        self._ids = {token: at for at, token in enumerate(self._tokens)}
        if len(self._ids) < len(self._tokens):
            twice = next(token for at, token in enumerate(self._tokens) if self._ids[token] != at)
            raise self.damaged(f"its vocabulary has the token {twice!r:.60} twice")
        if (longest := max(map(len, self._tokens))) > LONGEST_TOKEN:
            raise self.damaged(f"a token has {longest:,} characters")
        types = self._array("token_type", int) if "tokenizer.ggml.token_type" in metadata else [1] * len(self._tokens)
        self._check_length("token_type", types)
        ends = ENDS & self._ids.keys()
        self._control = {token for token, kind in zip(self._tokens, types, strict=True) if kind == CONTROL} | ends
        # Thousands of spare tokens are control tokens as well.
        self._special = {token for token in self._control if "unused" not in token}
        self._added = [
            token
            for token, kind in zip(self._tokens, types, strict=True)
            if kind in (UNKNOWN, USER_DEFINED) or token in self._control
        ]

    def damaged(self, reason: str) -> ModelDamagedError:
        return ModelDamagedError(
            f"the tokenizer of {self._name} can't be used: {reason}", "Download another file of the model."
        )

    def ends(self) -> list[int]:
        found = ENDS & self._ids.keys()
        if found & REPLY_ENDS and found & CALL_ENDS:
            found -= {MESSAGE_END}
        named = {self._token_id(key) for key in ("eos", "eot", "eom")}
        return sorted({self._ids[token] for token in found} | {each for each in named if each is not None})

    def config(self) -> dict[str, Any]:
        named = {name: self._tokens[at] for name, key in NAMED.items() if (at := self._token_id(key)) is not None}
        default, names = self._text("tokenizer.chat_template"), self._metadata.get("tokenizer.chat_templates")
        others = [str(each) for each in names] if isinstance(names, list) else []
        templates = {"default": default, **{each: self._text(f"tokenizer.chat_template.{each}") for each in others}}
        given = [{"name": each, "template": text} for each, text in templates.items() if text is not None]
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",  # others would make another tokenizer than tokenizer.json's
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": sorted(self._special - {*named.values()}, key=self._ids.__getitem__),
            **named,
            **({"chat_template": default if len(given) == 1 else given} if default is not None else {}),
        }

    def tokenizer(self) -> Tokenizer:
        backend, add_bos = self._sentence_pieces() if self._kind == SENTENCE_PIECES else self._byte_pairs()
        strips = any(each in (self._text("general.name") or "").lower() for each in STRIPPING)
        stripping = self._control - {"<s>", "<|endoftext|>"} if strips else set[str]()
        backend.add_tokens([
            AddedToken(token, special=token in self._special, normalized=False, rstrip=token in stripping)
            for token in self._added
        ])  # fmt: skip
        self._frame(backend, add_bos)
        return backend

    def _sentence_pieces(self) -> tuple[Tokenizer, bool]:
        unknown = self._token_id("unknown")
        model = models.BPE(
            vocab=self._ids,
            merges=self._scored_pairs(),
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = Tokenizer(model)
        prefixed = self._flag("add_space_prefix", otherwise=True)
        spaces = normalizers.Replace(" ", SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
        stripped = [decoders.Strip(" ", 1, 0)] if prefixed else []
        backend.decoder = decoders.Sequence([*_decoded_spaces(), *stripped])
        return backend, True

    def _scored_pairs(self) -> list[tuple[str, str]]:
        """Return every pair that makes a token, the best score first: SentencePiece joins whatever has the best one."""
        scores = self._array("scores", int | float)
        self._check_length("scores", scores)
        if not all(map(math.isfinite, scores)):
            raise self.damaged("its scores are not all numbers")
        best_first = sorted(range(len(scores)), key=lambda at: -scores[at])
        ids = self._ids
        return [
            (token[:at], token[at:])
            for token in map(self._tokens.__getitem__, best_first)
            for at in range(len(token) - 1, 0, -1)
            if token[:at] in ids and token[at:] in ids
        ]

    def _byte_pairs(self) -> tuple[Tokenizer, bool]:
        splitting = self._splitting()
        spaced = splitting.names[0] == SPACED
        model = models.BPE(
            vocab=self._ids,
            merges=list(self._ranked_pairs()),
            ignore_merges=splitting.ignore_merges,
            byte_fallback=spaced,
        )
        backend = Tokenizer(model)
        pieces: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in splitting.patterns]
        if spaced:
            backend.normalizer = normalizers.Replace(" ", SPACE)
            backend.decoder = decoders.Sequence(_decoded_spaces())
        else:
            pieces.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            backend.decoder = decoders.ByteLevel()
        backend.pre_tokenizer = pre_tokenizers.Sequence(pieces)
        return backend, splitting.add_bos

    def _ranked_pairs(self) -> Iterator[tuple[str, str]]:
        ids = self._ids
        for merge in dict.fromkeys(self._array("merges", str)):  # of two that are equal the first counts
            at = merge.find(" ", 1)
            first, second = merge[:at], merge[at + 1 :]
            if at < 0 or first not in ids or second not in ids or first + second not in ids:
                raise self.damaged(f"it joins {merge!r:.80}, which are not two tokens that make a third")
            yield first, second

    def _splitting(self) -> Splitting:
        named = SPACED if self._kind == SPACED else self._text("tokenizer.ggml.pre")
        if named is None:
            raise ModelUnsupportedError(
                f"{self._name} does not say how its tokenizer splits text (tokenizer.ggml.pre)",
                "It was made before April 2024: use a newer file of the model.",
            )
        with asset_path("pretokenizers.toml").open("rb") as file:
            known = (Splitting(**each) for each in tomllib.load(file)["family"])
        if (found := next((each for each in known if named in each.names), None)) is None:
            raise ModelUnsupportedError(
                f"{self._name} splits text as {named!r}, which is not known here",
                "Update Tokamac, or use another form of the model.",
            )
        return found

    def _frame(self, backend: Tokenizer, add_bos: bool) -> None:
        """Let BOS and EOS stand where the file wants them around a text that no template wrote."""
        wanted = {
            "bos": self._flag("add_bos_token", otherwise=add_bos),
            "eos": self._flag("add_eos_token", otherwise=False),
        }
        if self._kind == SPACED:
            wanted["bos"] = True  # its first files deny it
        found = {key: self._token_id(key) for key, wants in wanted.items() if wants}
        if missing := [key for key, at in found.items() if at is None]:
            raise self.damaged(f"texts are to have {missing[0].upper()}, and no token is that")
        marks = {key: (self._tokens[at], at) for key, at in found.items() if at is not None}
        if not marks:
            return
        before, after = ([marks[key][0]] if key in marks else [] for key in ("bos", "eos"))
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{mark}:1" for mark in before), "$B:1", *(f"{mark}:1" for mark in after)],
            special_tokens=[*{*marks.values()}],
        )

    def _text(self, key: str, *, required: bool = False) -> str | None:
        value = self._metadata.get(key)
        if not isinstance(value, str) and (required or value is not None):
            raise self.damaged(f"{key} is {'missing' if value is None else 'no text'}")
        return value

    def _flag(self, key: str, *, otherwise: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", otherwise)
        if not isinstance(value, bool):
            raise self.damaged(f"tokenizer.ggml.{key} is neither true nor false")
        return value

    def _array(self, key: str, kind: Any) -> list[Any]:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, list) or not value:
            raise self.damaged(f"it has no tokenizer.ggml.{key}")
        if not all(isinstance(each, kind) for each in value):
            raise self.damaged(f"tokenizer.ggml.{key} holds other things than {'text' if kind is str else 'numbers'}")
        return value

    def _check_length(self, key: str, values: list[Any]) -> None:
        if len(values) != len(self._tokens):
            raise self.damaged(f"tokenizer.ggml.{key} has {len(values):,} entries for {len(self._tokens):,} tokens")

    def _token_id(self, key: str) -> int | None:
        otherwise = DEFAULTS.get(key, len(self._tokens)) if self._kind == SENTENCE_PIECES else len(self._tokens)
        value = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is None:
            return otherwise if otherwise < len(self._tokens) else None
        if not isinstance(value, int) or not 0 <= value < len(self._tokens):
            raise self.damaged(f"its {key.upper()} is token {value}, of {len(self._tokens):,}")
        return value


def _decoded_spaces() -> list[Any]:
    return [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
