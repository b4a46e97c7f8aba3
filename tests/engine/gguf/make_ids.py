"""Make ``vocabularies.json``, ``ids.json`` and ``tests/real/gguf_ids.json``: the ids that llama.cpp gives odd texts.

    python -m tests.engine.gguf.make_ids

Needs llama-cpp-python, which nothing else does; the ids are those of the llama.cpp in its version 0.3.36.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gguf import GGUFWriter
from llama_cpp import Llama
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.engine.gguf.texts import FOLDER, cases, digests, odd_texts, small_texts
from tests.engine.gguf.written import add_key
from tests.real.models import MODELS
from tests.real.test_gguf_vocabulary import GOLDEN, texts_of

WORDS = 900
# What is in each vocabulary beside what is trained: tokens and their types. The last have no merges.
MARKS = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_end|>": 3, "<unused7>": 3, "<b>": 4, "\n\n": 4, "plugh": 1}
IDS = {f"{name}_token_id": at for at, name in enumerate(("unknown", "bos", "eos", "eot"))}


def main() -> None:
    """Write the files."""
    trained = {name: _train(byte_level=name == "gpt2") for name in ("gpt2", "gemma4")}
    (FOLDER / "vocabularies.json").write_text(json.dumps(trained, ensure_ascii=True, separators=(",", ":")) + "\n")
    small = {name: digests(_ids_of_keys(keys, small_texts())) for name, keys in cases()}
    (FOLDER / "ids.json").write_text(json.dumps(small, indent=0) + "\n")
    real = {model.name: digests(_ids(model.gguf, texts_of(model))) for model in MODELS}
    GOLDEN.write_text(json.dumps(real, indent=0) + "\n")


def _ids(path: Path, texts: Iterable[str]) -> Sequence[Sequence[int]]:
    model = Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


def _ids_of_keys(keys: Mapping[str, Any], texts: Iterable[str]) -> Sequence[Sequence[int]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "small.gguf"
        writer = GGUFWriter(path, "llama")
        for key, value in keys.items():
            add_key(writer, key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return _ids(path, texts)


def _train(*, byte_level: bool) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    if byte_level:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "removed")
    # Nothing is split, so that pairs are joined across every place where a pattern may cut.
    letters = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=letters, limit_alphabet=256, show_progress=False)
    # Tokens with a NUL in them would end there in C, and no vocabulary has one of two bytes' tokens.
    texts = (text.replace("\0", "").replace("<0x0A>", "") for text in odd_texts(4_000, 0, ["the"]))
    tokenizer.train_from_iterator(texts, trainer)
    trained = json.loads(tokenizer.to_str())["model"]
    known = [*MARKS, *([] if byte_level else [f"<0x{byte:02X}>" for byte in range(256)])]
    tokens = [*known, *(token for token in trained["vocab"] if token not in known)]
    types = [MARKS.get(token, 6 if at < len(known) else 1) for at, token in enumerate(tokens)]
    return {"tokens": tokens, "token_type": types, "merges": [" ".join(pair) for pair in trained["merges"]], **IDS}


if __name__ == "__main__":
    main()
