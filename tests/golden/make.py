"""Make the golden values: log-probabilities and greedy chats as Hugging Face transformers computes them.

    pip install -e '.[golden]' && python -m tests.golden.make [CASE…]
    python -m tests.golden.make --changed [CASE…]

For every case of families.py it writes ``<case>/config.json`` exactly as transformers saves it, ``<case>/golden.npz`` (token
ids and log-probabilities) and ``<case>/case.json`` (seed, tensor shapes, and for some three greedy chat turns). The model
reads its weights from the same kind of folder as the test builds: ``weights.py`` under the names in the checkpoint.

With ``--changed`` it writes ``<case>/changed.json`` for cases that are there: for every scalar of the config by which the
reference's answer moves, another value and what the reference says then. A key that our side does not honour is found so.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.golden.families import (
    AS_PUBLISHED,
    CASES,
    CHANGED_TOKENS,
    CHATS,
    MOVES,
    SMALL,
    VOCABULARY,
    WINDOW,
    changed_rows,
    others,
    prompt_tokens,
    replaced,
    scalars,
)
from tests.golden.weights import Shapes, write_weights

HERE = Path(__file__).parent
SPECIALS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TURNS = ("why is decode slow?", "and what of prefill", "thanks!")
REPLY_TOKENS = 10
CLEAR = 0.02  # the likeliest token must lead by this much at every step, so that rounding can't change a greedy reply
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 128 entries: printable ASCII, a few merges, the chat's marks."""
    alphabet = ["Ċ", "Ġ", *map(chr, range(33, 127))]
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ġ", "the"), ("Ġ", "a"), ("o", "n")]
    merges += [("r", "e"), ("i", "s"), ("Ġ", "is"), ("o", "f"), ("Ġ", "of"), ("w", "h"), ("l", "l"), ("e", "d")]
    merges += [("o", "r"), ("e", "n"), ("a", "t"), ("i", "t"), ("e", "s"), ("o", "u"), ("s", "t"), ("n", "d")]
    tokens = [*SPECIALS, *alphabet, *(a + b for a, b in merges)]
    extra = [f"<|extra_{i}|>" for i in range(VOCABULARY - len(tokens))]
    vocabulary = {token: i for i, token in enumerate([*tokens, *extra])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [*SPECIALS, *extra]])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def auto_class(config: Any) -> Any:
    """Return what makes the model of a configuration: one that also sees, where the configuration says that it does."""
    sees = getattr(config, "vision_config", None) is not None
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def saved_shapes(config: Any, folder: Path) -> Shapes:
    """Save an untrained model and return the names and shapes of its checkpoint; config.json stays behind."""
    auto_class(config).from_config(config).save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        # transformers saves the language layers of Kimi K2.5 under a name of the part that sees, and reads both.
        kimi = ("language_model.model.blocks.", "language_model.model.layers.")
        names = {name: name.replace(*kimi) for name in file.keys()}  # noqa: SIM118
        return {new: tuple(file.get_slice(name).get_shape()) for name, new in names.items()}


def load(folder: Path, seed: int, shapes: Shapes) -> Any:
    """Load the folder with NumPy's weights into transformers, float32, plain attention."""
    write_weights(folder, seed, shapes, json.loads((folder / "config.json").read_text()))
    model, report = read(folder)
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise SystemExit(f"{folder.name}: transformers does not load these weights: {report}")
    return model


def read(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return transformers' model of a folder, and which parameters and weights did not meet."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model, report = auto_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), report


@torch.no_grad()
def logprobs(model: Any, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Return the log-probabilities of the next token at every position: (T, V) float32."""
    logits = model(torch.tensor([tokens])).logits[0].double()
    return np.asarray(torch.log_softmax(logits, -1).float().numpy())


def reply(model: Any, prompt: list[int]) -> list[int] | None:
    """Return transformers' greedy reply, or None where it is not clear-cut or holds a special token."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        do_sample=False,
        max_new_tokens=REPLY_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    ids: list[int] = out.sequences[0, len(prompt) :].tolist()
    plain = all(len(SPECIALS) <= token < VOCABULARY for token in ids)
    return ids if plain and float((best[:, 0] - best[:, 1]).min()) > CLEAR else None


def chat(model: Any, tokenizer: Any) -> list[dict[str, Any]] | None:
    """Return three greedy turns, or None where one of them is not clear-cut."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "be brief"}]
    turns = []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        ids = reply(model, prompt)
        if ids is None:
            return None
        said = tokenizer.decode(ids)
        turns.append({"user": text, "prompt": prompt, "reply": ids, "text": said})
        messages.append({"role": "assistant", "content": said})
    return turns


def clear_cut(folder: Path, shapes: Shapes, case: str, tokenizer: Any) -> tuple[int, Any, list[dict[str, Any]] | None]:
    """Return the first seed whose chat is clear-cut, where the case has one, with its model and its turns."""
    for seed in range(100):
        model = load(folder, seed, shapes)
        turns = chat(model, tokenizer) if case in CHATS else None
        if turns or case not in CHATS:
            return seed, model, turns
    raise SystemExit(f"{case}: no seed gives a clear-cut chat")


def check_window(folder: Path, seed: int, shapes: Shapes, tokens: list[int], windowed: np.ndarray[Any, Any]) -> None:
    """Stop where the same model without its window says the same: such a case would test nothing."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": len(tokens)}))
    off = np.abs(logprobs(load(folder, seed, shapes), tokens) - windowed).max(axis=1)
    if off[:WINDOW].max() > 1e-3 or off[WINDOW:].max() < 0.1:
        raise SystemExit(f"a window of {WINDOW} tokens does not show in {off}")


def make(case: str, tokenizer: Any) -> None:
    """Write one case. Seeds are tried in order until the chat is clear-cut."""
    kind, values = CASES[case]
    small = {} if "text_config" in values else SMALL
    config = getattr(transformers, kind)(**copy.deepcopy({**small, **values}))  # some take keys out
    vocabulary = config.get_text_config().vocab_size
    target = HERE / case
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = saved_shapes(config, folder)
        if case in AS_PUBLISHED:
            named = {
                "model_type": config.model_type,
                "dtype": "float32",
                "architectures": [f"{kind.removesuffix('Config')}ForCausalLM"],
            }
            (folder / "config.json").write_text(json.dumps({**named, **small, **values}, indent=2) + "\n")
        (target / "config.json").write_bytes((folder / "config.json").read_bytes())
        seed, model, turns = clear_cut(folder, shapes, case, tokenizer)
        tokens = np.random.default_rng(7).integers(5, vocabulary, prompt_tokens(case)).tolist()
        values_out = logprobs(model, tokens)
        if case.endswith("_window"):
            check_window(folder, seed, shapes, tokens, values_out)
    np.savez_compressed(target / "golden.npz", tokens=np.array(tokens, np.int32), logprobs=values_out)
    written = {"seed": seed, "shapes": shapes} | ({"system": "be brief", "turns": turns} if turns else {})
    (target / "case.json").write_text(json.dumps(written) + "\n")
    print(f"{case}: seed {seed}, log-probabilities from {values_out.min():.1f} to {values_out.max():.2f}")


def change(case: str) -> None:
    """Write what the reference says with each scalar of a case's config changed by which its answer moves."""
    target = HERE / case
    stored = json.loads((target / "case.json").read_text())
    config = json.loads((target / "config.json").read_text())
    with np.load(target / "golden.npz") as golden:
        tokens, expected = golden["tokens"].tolist(), golden["logprobs"]
    rows = changed_rows(len(tokens))
    moved = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config))
        write_weights(folder, stored["seed"], stored["shapes"], config)
        for path, value in scalars(config):
            for other in others(path[-1], value):
                (folder / "config.json").write_text(json.dumps(replaced(config, path, other)))
                found = answer(folder, tokens)
                if found is not None and np.abs(found - expected).max() > MOVES:
                    told = [round(float(number), 5) for number in found[rows][:, CHANGED_TOKENS].flat]
                    moved.append({"path": path, "value": other, "logprobs": told})
                    break
    lines = ",\n".join(json.dumps(each) for each in moved)
    (target / "changed.json").write_text(f"[\n{lines}\n]\n")
    print(f"{case}: moved by {', '.join('.'.join(each['path']) for each in moved)}")


def answer(folder: Path, tokens: list[int]) -> np.ndarray[Any, Any] | None:
    """Return the reference's log-probabilities, or None where it does not load the folder whole, or they are no numbers."""
    try:
        model, report = read(folder)
        found = logprobs(model, tokens)
    except Exception:  # a changed config may fail in any way
        return None
    whole = not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return found if whole and bool(np.isfinite(found).all()) else None


def main() -> None:
    """Make the named cases, or all."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    make_tokenizer(HERE / "tokenizer")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(HERE / "tokenizer")
    if sys.argv[1:2] == ["--changed"]:
        for case in sys.argv[2:] or CASES:
            change(case)
    else:
        for case in sys.argv[1:] or CASES:
            make(case, tokenizer)


if __name__ == "__main__":
    main()
