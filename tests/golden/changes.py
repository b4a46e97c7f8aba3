"""Configs changed in one scalar: which there are, and where the reference's answers to them are looked at."""

import copy
from collections.abc import Iterator
from typing import Any

MOVES = 1e-3
"""A change counts as seen where a log-probability of the reference moves by more than this."""

CHANGED_TOKENS = [0, 3, 5, 7, 9, 11]
"""The tokens whose log-probabilities are kept; the smallest vocabulary has twelve."""

ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
NEVER = {"transformers_version", "dtype", "torch_dtype", "model_type", "initializer_range", "use_cache", "pad_token_id"}
NEVER |= {"bos_token_id", "eos_token_id", "rescale_prenorm_residual"}


def changed_rows(tokens: int) -> list[int]:
    """Return the positions of a prompt of so many tokens that are kept."""
    return [tokens // 2, tokens - 1]


def scalars(config: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every scalar, and list of fractions, of a config with its path, but what says nothing of what a text model computes."""
    for key, value in config.items():
        if isinstance(value, dict):
            if key not in ("vision_config", "audio_config", "id2label", "label2id", "per_layer_config"):
                yield from scalars(value, (*path, key))
        elif key not in NEVER and not key.endswith("_token_id") and (not isinstance(value, list) or _numbers(value)):
            yield (*path, key), value


def _numbers(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(each, float) for each in value)


def others(key: str, value: Any) -> Iterator[Any]:
    """Yield values to try in place of a scalar's own."""
    if key in ACTIVATIONS:
        yield "relu" if value != "relu" else "silu"
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (other for other in (value + 1, value * 2, value // 2) if other > 0)
    elif key == "partial_rotary_factor":
        yield 0.5 if value != 0.5 else 0.75
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.1, value * 0.5 + 0.01)
    elif isinstance(value, list):
        yield [each * 1.5 for each in value]
    elif value is None:
        yield from (0.5, 2, True)


def replaced(config: dict[str, Any], path: tuple[str, ...] | list[str], value: Any) -> dict[str, Any]:
    """Return a copy of a config with another value at a path."""
    changed = copy.deepcopy(config)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed
