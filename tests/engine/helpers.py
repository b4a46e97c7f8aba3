"""Seeded models and adapters as files, and work that can't hold up the suite."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.waiting import PATIENCE_S
from tokamac.engine.events import Event, Finished
from tokamac.engine.reply import ReplyTask
from tokamac.engine.runner import Runner
from tokamac.engine.schedule.decoding import Lane

T = TypeVar("T")

DEADLINE_S = PATIENCE_S


def within(work: Callable[[], T]) -> T:
    """Return what ``work`` returns on a thread that can't hold up the suite; fail where it does not return at all."""
    found: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it hangs"
    if failed:
        raise failed[0]
    return found[0]


def made(runner: Runner, reply: ReplyTask, read: Callable[[Event], object] = lambda _: None) -> Iterator[Event]:
    """Yield the events of one reply, made alone, on the engine's thread. read: given what a token says as it is handed over."""
    said: list[Event] = []

    def put(event: Event) -> None:
        read(event)
        said.append(event)

    for given in reply.events():
        if isinstance(given, Lane):
            goes_on = False
            while not goes_on:
                for found in runner.decode([given]):
                    assert found.token is not None
                    goes_on = reply.feed(found.token, put)
                    yield from said
                    said.clear()
        elif given is not None:
            yield given


# A seeded llama folder made with MLX: packed if wanted, a tokenizer whose every token is a byte, thinking marks if
# wanted.

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 272,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
SPECIAL = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(thinking: bool = False, marks: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer whose every token is a byte, so that any text splits inside its characters. marks: more special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = (SPECIAL if thinking else SPECIAL[:5]) + marks
    vocabulary = {text: i for i, text in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def write_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, thinking: bool = False, marks: tuple[str, ...] = ()
) -> None:
    byte_tokenizer(thinking, marks).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    *,
    bits: int | None = None,
    group_size: int = 32,
    dtype: mx.Dtype = mx.float32,
    seed: int = 0,
    template: str | None = TEMPLATE,
    thinking: bool = False,
    **changes: Any,
) -> Path:
    """Write a seeded llama with these changes to its config, or another ``model_type``; ``bits`` packs it in groups.

    Return the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    family = import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = family.Model(family.ModelArgs.from_dict(config))
    model.update(tree_map(lambda a: mx.random.normal(a.shape) * 0.2 if a.ndim > 1 else a, model.parameters()))
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, group_size, bits)
        config["quantization"] = {"group_size": group_size, "bits": bits}
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, template=template, thinking=thinking)
    return folder


# Seeded adapters as files, in PEFT's form and in mlx-lm's, and the same changes worked out with NumPy.

Array = np.ndarray[Any, Any]
RANK, ALPHA = 4, 6.0
TARGETS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The model's weights by name, without ``.weight``."""
    arrays = mx.load(str(folder / "model.safetensors"))
    return {name.removesuffix(".weight"): tuple(array.shape) for name, array in arrays.items()}


def write_peft(
    folder: Path,
    model: Path,
    *,
    paths: tuple[str, ...] | None = None,
    seed: int = 0,
    rank: int = RANK,
    dora: bool = False,
    more: dict[str, Array] | None = None,
    **config: Any,
) -> Path:
    """Write an adapter of these modules (TARGETS of every layer) as PEFT does; ``config`` changes its config."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes, random = shapes_of(model), np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for path in paths or default_paths(shapes):
        rows, columns = shapes[path]
        down = random.standard_normal((rank, columns)).astype(np.float32) / 4
        up = random.standard_normal((rows, rank)).astype(np.float32) / 4
        stem = f"base_model.model.{path}"
        if path.endswith("embed_tokens"):
            tensors[f"{stem}.lora_embedding_A"], tensors[f"{stem}.lora_embedding_B"] = up.T.copy(), down.T.copy()
        else:
            tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = down, up
        if dora:
            tensors[f"{stem}.lora_magnitude_vector"] = 1 + random.random(rows, np.float32)
    save_file(tensors | (more or {}), folder / "adapter_model.safetensors")
    written = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": ALPHA,
        "use_dora": dora,
        "base_model_name_or_path": "org/base",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def as_mlx(folder: Path, peft: Path) -> Path:
    """Write what ``write_peft`` wrote as mlx-lm would: the same changes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((peft / "adapter_config.json").read_text())
    kinds = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b", "lora_magnitude_vector": "m"}
    tensors = {}
    for name, array in load_file(peft / "adapter_model.safetensors").items():
        for theirs, ours in kinds.items():
            if name.endswith(theirs):
                stem = name.removeprefix("base_model.model.").removesuffix(theirs)
                tensors[stem + ours] = np.ascontiguousarray(array.T)
    save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": config["r"], "scale": config["lora_alpha"] / config["r"], "dropout": 0.0}
    kind = "dora" if config["use_dora"] else "lora"
    written = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters, "model": "org/base"}
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def default_paths(shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    return tuple(name for name in shapes if name.endswith(TARGETS))


def write_fused(folder: Path, model: Path, peft: Path, scales: dict[str, float] | None = None) -> Path:
    """Write the model with an adapter's changes in its weights, worked out here with NumPy from the papers' formulas.

    scales: by the end of a path, where it is not alpha ÷ r.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.name != "model.safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    weights = {
        name: np.array(array.astype(mx.float32)) for name, array in mx.load(str(model / "model.safetensors")).items()
    }
    tensors = load_file(peft / "adapter_model.safetensors")
    for name in tensors:
        for kind, other in (("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")):
            if not name.endswith(kind):
                continue
            path = name.removeprefix("base_model.model.").removesuffix(f".{kind}")
            scale = next((value for end, value in (scales or {}).items() if path.endswith(end)), ALPHA / RANK)
            change = tensors[name.replace(kind, other)] @ tensors[name]
            changed = weights[f"{path}.weight"] + scale * (change.T if "embedding" in kind else change)
            magnitude = tensors.get(name.replace(kind, "lora_magnitude_vector"))
            if magnitude is not None:
                changed = changed * (magnitude / np.linalg.norm(changed, axis=1))[:, None]
            weights[f"{path}.weight"] = changed.astype(np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


def finish(events: Iterable[object]) -> Finished:
    """Read a reply to its end; return that."""
    *_, end = events
    assert isinstance(end, Finished)
    return end
