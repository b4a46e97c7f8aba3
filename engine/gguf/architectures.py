"""A GGUF file's config and the places of its tensors, as mlx-lm's class of its architecture has them."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..errors import ModelUnsupportedError
from .blocks import FLOATS, LOG, MINUS_ONE, PACKINGS, Order
from .families import DEEPSEEK_V3, FAMILIES, KEYS, LAYER, MIXTRAL, OLMO3, SIGMOID, TOP, Architecture, Parts, halves
from .file import GgufFile, GgufTensor
from .parameters import Config, HyperParameters, Shape, rope_scaling
from .places import damaged

# Read for the config, or of no use: rotary factors, and what quantizers leave behind.
NOT_WEIGHTS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*\.attn_rot_embd")
BLOCK = re.compile(r"blk\.(\d+)\.(.+?)(?:\.(weight|bias))?")


def config_of(file: GgufFile) -> Config:
    """Return what config.json would hold. Raises ModelUnsupportedError for an unknown architecture."""
    family, params = family_of(file), HyperParameters(file)
    config: Config = {
        "model_type": family.model_type,
        "num_hidden_layers": params.layers,
        "vocab_size": params.shape("token_embd.weight")[0],
        "rope_theta": params.number("rope.freq_base", 10_000.0),
        "tie_word_embeddings": not params.has("output.weight"),
        "attention_bias": params.has("blk.0.attn_q.bias"),
        "mlp_bias": params.has("blk.0.ffn_up.bias"),
        "torch_dtype": dtype_of(file),
        **family.given,
    }
    if family.head_dim:
        config["head_dim"] = params.head_dim
    for name, key in {**KEYS, **family.keys}.items():
        if params.find(key) is not None:
            config[name] = params.least(key)
    if (scaling := rope_scaling(params)) is not None:
        config["rope_scaling"] = scaling
    if isinstance(sections := params.find("rope.dimension_sections"), list):
        config["mrope_section"] = [each for each in sections if each]
    if family.partial:
        config["partial_rotary_factor"] = params.number("rope.dimension_count", params.head_dim) / params.head_dim
    config |= family.more(params) if family.more else {}
    if not family.nested:
        return config
    return {name: config[name] for name in ("model_type", "torch_dtype")} | {"text_config": config}


def family_of(file: GgufFile) -> Architecture:
    """Raises ModelUnsupportedError, naming the architecture."""
    name = file.architecture
    family = FAMILIES.get(name)
    if family is None:
        raise ModelUnsupportedError(
            f"{file.files[0]} is a GGUF file of the architecture {name:.60}, which is not known here",
            "Use the model's safetensors version, for example from mlx-community.",
        )
    if name == "llama" and HyperParameters(file).find("expert_count"):
        return MIXTRAL
    if name == "olmo2" and HyperParameters(file).find("attention.sliding_window"):
        return OLMO3
    if name == "deepseek2" and HyperParameters(file).find("expert_gating_func") == SIGMOID:
        return DEEPSEEK_V3
    return family


def dtype_of(file: GgufFile) -> str:
    """Return the type that a GPU computes in: float16 where it fits."""
    stored = {tensor.kind.name for tensor in file.tensors.values()}
    return "bfloat16" if "BF16" in stored or family_of(file).wide else "float16"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes, or some of it; ``module`` is its whole name if ``leaf`` is empty."""

    module: str
    leaf: str
    shape: Shape
    order: Order
    change: str


def places_of(file: GgufFile, tensor: GgufTensor) -> Iterator[Place]:
    """Yield a tensor's places in mlx-lm's class, none for one that isn't read. Raises ModelUnsupportedError."""
    family, params = family_of(file), HyperParameters(file)
    if NOT_WEIGHTS.match(tensor.name):
        return
    if (found := BLOCK.fullmatch(tensor.name)) is None:
        stem, _, leaf = tensor.name.rpartition(".")
        names, begin = {**TOP, **family.top}, ""
    else:
        stem, leaf = found[2], found[3] or ""
        if int(found[1]) >= params.layers:
            return
        names, begin = {**LAYER, **family.layer}, f"{family.stem}.{int(found[1])}."
    less_one = family.less_one and stem.endswith("norm") and leaf != "bias"
    change = MINUS_ONE if less_one else LOG if stem in family.logs else ""
    for part, (order, shape) in _parts(family, params, tensor, stem, names).items():
        reshape = family.shapes.get(stem, tuple)
        yield Place(begin + part, "" if stem in family.bare else leaf, reshape(shape), order, change)


def _parts(
    family: Architecture, params: HyperParameters, tensor: GgufTensor, stem: str, names: Mapping[str, str]
) -> Parts:
    if stem == "ffn_gate_up_exps":
        return halves(tensor.shape, names["ffn_gate_exps"], names["ffn_up_exps"])
    if stem in family.parts:
        parts = family.parts[stem](params, tensor.shape)
    elif stem in names:
        turned = params.head_dim if family.turned and stem in ("attn_q", "attn_k") else 0
        parts = {names[stem]: (Order(turned=turned), tensor.shape)}
    else:
        raise ModelUnsupportedError(
            f"{params.file.files[0]} holds {tensor.name:.80}, which {family.model_type} models are not known to have",
            "Use the model's safetensors version.",
        )
    rows = tensor.rows if len(tensor.shape) > 1 else tensor.shape[0]
    group = 1 if tensor.kind in FLOATS or tensor.kind not in PACKINGS else PACKINGS[tensor.kind].group_size
    for order, shape in parts.values():
        odd = order.turned and (order.turned < 2 or order.turned % 2 or rows % order.turned)
        runs = order.runs or ((0, rows),)
        there = all(0 <= begin < end <= rows for begin, end in runs)
        whole = sum(end - begin for begin, end in runs) == (math.prod(shape[:-1]) if len(shape) > 1 else shape[0])
        if odd or not there or not whole or (order.columns and shape[-1] % (len(order.columns) * group)):
            raise damaged(tensor.file, f"{tensor.name:.80} does not hold the heads that it tells of")
    return parts
