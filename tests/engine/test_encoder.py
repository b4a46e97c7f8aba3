"""A conversation that went on is encoded where it is new, and only there; the ids are those of the whole text."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tests.engine.seeded import TEMPLATE, write_tokenizer
from tokamac.engine import KVSpec, Message, Sampling
from tokamac.engine.metrics import Recorder
from tokamac.engine.text import encoder as encoders
from tokamac.engine.text.prompt import Prompting
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer

TRAINED_ON = (
    "the river had risen in the night, and by morning the lower fields were a lake. "
    "<user> asks  what\n\n    prefill() does; the answer: it reads 12345 tokens. zzz Word words"
)
TEXT = TRAINED_ON.replace("<user>", "who")
CONVERSATION = (
    "<bos><user>Why  the river?\n\n<end>\n<assistant> A lake. <end> zzz\n<user>  def f():\n    return 12<end>"
)


def added(name: str) -> list[AddedToken]:
    """Added tokens of every kind that published tokenizers have."""
    plain = [AddedToken(each, special=True, normalized=False) for each in ("<bos>", "<user>", "<assistant>")]
    kinds = {
        "plain": AddedToken("<end>", special=True, normalized=False),
        "rstrip": AddedToken("<end>", special=True, normalized=False, rstrip=True),
        "lstrip": AddedToken("<end>", special=True, normalized=False, lstrip=True),
        "normalized": AddedToken("<end>", special=False, normalized=True),
        "single word": AddedToken("zzz", special=False, normalized=False, single_word=True),
    }
    return [*plain, kinds[name], *([] if name in ("plain", "single word") else [AddedToken("  ", normalized=False)])]


def backend(style: str, name: str) -> Backend:
    if style == "bytes":
        made = Backend(models.BPE())
        split = pre_tokenizers.Split(Regex(r" ?\w+|\s+(?!\S)|\s+|[^\w\s]+"), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])  # type: ignore[no-untyped-call]
        made.decoder = decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    else:  # as SentencePiece's models are converted: a space before the first word, or before every piece
        made = Backend(models.Unigram())
        if style == "prepend":
            made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[no-untyped-call]
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style)  # type: ignore[arg-type]
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, unk_token="<unk>", special_tokens=["<unk>"])
    made.train_from_iterator([TRAINED_ON] * 20, trainer)
    made.add_tokens(added(name))
    return made


def loaded(folder: Path, made: Backend) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder, {}, "tiny")


STYLES = [
    (style, name)
    for style in ("bytes", "first", "always", "prepend")
    for name in ("plain", "rstrip", "lstrip", "normalized", "single word")
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Tokenizer, Backend]]:
    made = {}
    for style, name in STYLES:
        one = backend(style, name)
        made[style, name] = loaded(tmp_path_factory.mktemp("tokenizer"), one), one
    return made


PIECES = ("<bos>", "<user>", "<assistant>", "<end>", "zzz", "  ", " ", "\n", "the ", "river", "é", "<", ">", "12")


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=14), style=st.sampled_from(STYLES))
def test_the_ids_are_those_of_the_whole_text(
    tokenizers: dict[tuple[str, str], tuple[Tokenizer, Backend]], pieces: list[str], style: tuple[str, str]
) -> None:
    tokenizer, whole = tokenizers[style]
    for text in ("".join(pieces), CONVERSATION + "".join(pieces)):
        expected = whole.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == expected
        assert tokenizer.encode(text) == expected  # and from what is remembered


class Counting:
    """A tokenizer of transformers that notes what it is given to encode."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, text: str, **more: Any) -> list[int]:
        self.texts.append(text)
        return list(self._inner.encode(text, **more))


@pytest.fixture
def counted(tmp_path: Path) -> tuple[Tokenizer, Counting]:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    counting = Counting(AutoTokenizer.from_pretrained(str(tmp_path)))
    return Tokenizer(counting, frozenset({1}), "tiny"), counting


def prompting(tokenizer: Tokenizer, kv: KVSpec = KVSpec(), capacity: int | None = None) -> Prompting:  # noqa: B008
    runtime: Any = SimpleNamespace(tokenizer=tokenizer, capacity=capacity, kv=kv)
    return Prompting(runtime, tokenizer.vocabulary_size, checkpoints=True)


def turns(count: int) -> list[Message]:
    said = [Message("system", "Be brief.")]
    for number in range(count):
        said += [Message("user", f"Question {number}: {TEXT}"), Message("assistant", f"Reply {number}. " * 9)]
    return said


def test_a_turn_encodes_what_is_new_and_that_once(counted: tuple[Tokenizer, Counting]) -> None:
    tokenizer, counting = counted
    makes = prompting(tokenizer)
    said = turns(20)
    makes.request([*said, Message("user", "First?")], Sampling(), Recorder())
    whole = sum(map(len, counting.texts))
    counting.texts.clear()
    said += [Message("user", "First?"), Message("assistant", "An answer."), Message("user", "Next?")]
    request = makes.request(said, Sampling(), Recorder())
    assert sorted(text for text in counting.texts if len(text) > 8) == ["<assistant>An answer.", "<user>Next?"]
    assert sum(map(len, counting.texts)) < 60 < whole / 50
    fresh = prompting(Tokenizer(counting, frozenset({1}), "tiny")).request(said, Sampling(), Recorder())
    assert (request.ids, request.checkpoints) == (fresh.ids, fresh.checkpoints)
    plain = tokenizer.render(said)
    assert request.ids == list(counting.backend_tokenizer.encode(plain, add_special_tokens=False).ids)


@pytest.mark.parametrize("kv", [KVSpec(window=4096, keep="system"), KVSpec(on_full="truncate-middle")])
def test_no_segment_is_encoded_twice_for_a_request(counted: tuple[Tokenizer, Counting], kv: KVSpec) -> None:
    tokenizer, counting = counted
    capacity = None if kv.window else 1200
    prompting(tokenizer, kv, capacity).request([*turns(8), Message("user", "Next?")], Sampling(), Recorder())
    long = [text for text in counting.texts if text.startswith("<") and len(text) > 8]
    assert len(long) == len(set(long)) > 10


def test_what_is_remembered_is_bounded(counted: tuple[Tokenizer, Counting], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, counting = counted
    monkeypatch.setattr(encoders, "MOST_CHARACTERS", 30)
    first = tokenizer.encode("<user>0123456789")
    for number in range(9):
        tokenizer.encode(f"<user>abcdefghi{number}")
    counting.texts.clear()
    assert tokenizer.encode("<user>abcdefghi8")
    assert not counting.texts
    assert tokenizer.encode("<user>0123456789") == first
    assert len(counting.texts) == 1
    assert tokenizer.encode("<user>" + "x" * 99) == tokenizer.encode("<user>" + "x" * 99)
    assert len(counting.texts) == 3  # longer than all that may be remembered


def test_a_caller_may_change_the_ids_it_was_given(counted: tuple[Tokenizer, Counting]) -> None:
    tokenizer, _ = counted
    ids = tokenizer.encode("<user>once")
    ids.append(7)
    assert tokenizer.encode("<user>once") == ids[:-1]
