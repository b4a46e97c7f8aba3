"""The guide's tokenizer: byte-level BPE trained on the corpus, and the chat template that tells the roles apart."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
SYSTEM, USER, ASSISTANT, END, PAD = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"
SPECIAL = (SYSTEM, USER, ASSISTANT, END, PAD)

# Each turn ends where the next begins, so a conversation's tokens are a prefix of its continuation's: caches can be kept.
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a BPE tokenizer of VOCABULARY tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = _decoder()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of an earlier checkpoint."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = _decoder()
    return tokenizer


def _decoder() -> decoders.Decoder:
    # Every text is encoded with a space before it (so a word is one token wherever it stands); a reply is shown without it.
    return decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])


def mark_id(tokenizer: Tokenizer, mark: str) -> int:
    """Return the token id of one of the SPECIAL marks. Raises ValueError when the tokenizer lacks it."""
    token: int | None = tokenizer.token_to_id(mark)
    if token is None:
        raise ValueError(f"the tokenizer has no {mark}")
    return token


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, its config and the chat template, as Hugging Face tools expect them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
