"""What a model costs and whether it fits here, from config.json and the safetensors headers: no weight is read."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokamac.engine.config import read_config
from tokamac.engine.errors import ModelNotFoundError, OptionError
from tokamac.engine.limits import kv_cost, memory
from tokamac.engine.limits.bandwidth import with_bandwidth
from tokamac.engine.limits.cost import PARTS, Cost, Form, PartName, cost_of_folder, first_of, text_config
from tokamac.engine.limits.hardware import Chip, detect
from tokamac.engine.limits.kv_table import KVTable, kv_table
from tokamac.engine.limits.limits import limits_for
from tokamac.engine.limits.memory import Fit
from tokamac.engine.options import KVSpec

CHUNK = 512
"""Prompt tokens computed at once, for the estimate of temporaries; the engine's own is of this order on every device."""


@dataclass(frozen=True, slots=True)
class PartCost:
    """One part of a model: how many weights, in how many bytes, at how many bits each (None where it has none)."""

    part: PartName
    parameters: int
    bytes: int
    bits_per_weight: float | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """The answer to "can I run this, and how fast at most?". Bytes, GB/s, tokens a second; None is unknown.

    weight_bytes, bits_per_weight and parts are of the files; ``form`` says how the engine holds the weights here, and
    bytes_per_step, ceiling_tps and memory are of that form: a plain CPU unpacks small models to float32.
    kv_bytes_per_token: while no window is full. kv_table: layer by layer, or None and kv_reason why not; KV bytes are then counted
    from the config alone. expected_tps, prefill_tps and ttft_s are not predicted yet.
    """

    model: str
    architecture: str
    parameters: int
    weight_bytes: int
    bits_per_weight: float | None
    parts: tuple[PartCost, ...]
    form: Form
    context: int
    context_length: int | None
    kv_bytes_per_token: int | None
    bytes_per_step: int | None
    chip: Chip
    ceiling_tps: float | None
    expected_tps: float | None
    prefill_tps: float | None
    ttft_s: float | None
    memory: Fit
    kv_table: KVTable | None = None
    kv_reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values under the names of the public contract."""
        return asdict(self)


def inspect_model(
    folder: Path, context: int = 4096, kv: KVSpec | None = None, *, chip: Chip | None = None, form: Form | None = None
) -> Inspection:
    """Return what the model in ``folder`` costs at a context of so many tokens.

    chip: None takes this machine's, measuring its bandwidth where no table knows it. form: None takes the engine's choice here.
    Raises ModelError for a folder that is not there, or not whole, and OptionError for a KV flag that can't be honoured.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder", "Name a model folder, a Hugging Face id, or `guide`.")
    config = read_config(folder)
    stored = cost_of_folder(folder, config)
    form = form or form_here(stored)
    held = cost_of_folder(folder, config, form=form)
    chip = with_bandwidth(detect(), held.weight_bytes_per_token or held.weight_bytes) if chip is None else chip
    value_bytes = kv_cost.value_bytes_of(config) if form == "stored" else 4
    planned = kv_table(config, kv or KVSpec(), context, value_bytes=value_bytes)
    per_token, kept = _kv(planned, config, kv or KVSpec(), context, value_bytes)
    limits = limits_for(context, weight_bytes_per_token=held.weight_bytes_per_token, kv_bytes_per_step=kept, chip=chip)
    working = working_bytes(config, value_bytes=value_bytes)
    # An unknown KV size counts as nothing here: that it is unknown shows in kv_bytes_per_token.
    fit = memory.fit(weights=held.weight_bytes, kv=kept or 0, working=working, budget=memory.budget())
    return Inspection(
        model=str(folder),
        architecture=_architecture(config),
        parameters=stored.parameters,
        weight_bytes=stored.weight_bytes,
        bits_per_weight=stored.bits_per_weight,
        parts=_parts(stored),
        form=form,
        context=context,
        context_length=_context_length(config),
        kv_bytes_per_token=per_token,
        bytes_per_step=limits.bytes_per_step,
        chip=chip,
        ceiling_tps=limits.ceiling_tps,
        expected_tps=limits.expected_tps,
        prefill_tps=None,
        ttft_s=None,
        memory=fit,
        kv_table=planned if isinstance(planned, KVTable) else None,
        kv_reason=planned if isinstance(planned, str) else None,
    )


def form_here(stored: Cost) -> Form:
    """Return how the engine would hold these weights on this machine (engine/cpu.py decides the same from the modules)."""
    from tokamac.engine.device import device_kind

    if device_kind() != "cpu":
        return "stored"
    from tokamac.engine.cpu import MEMORY_SHARE

    dense = 4 * sum(
        part.parameters for name, part in stored.parts.items() if name not in ("experts", "norms and other")
    )
    total = memory.machine_total()
    return "unpacked" if total is not None and dense <= MEMORY_SHARE * total else "float32"


def working_bytes(config: Mapping[str, Any], *, chunk: int = CHUNK, value_bytes: int = 2) -> int:
    """Return a rough size of the largest temporaries of one layer's prefill chunk, and the logits of one token.

    The widest layer's activations three times over (gate, up and their product), the residual twice, queries, keys and values.
    """
    text = text_config(config)
    hidden = int(first_of(text, "hidden_size", "n_embd") or 0)
    used = int(first_of(text, "num_experts_per_tok", "num_experts_per_token") or 1)
    dense = int(first_of(text, "intermediate_size", "n_inner") or 4 * hidden)
    width = max(dense, used * int(text.get("moe_intermediate_size") or 0))
    return chunk * value_bytes * (3 * width + 5 * hidden) + 4 * int(text.get("vocab_size") or 0)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0] if isinstance(names, list) and names else text_config(config).get("model_type", "unknown"))


def _context_length(config: Mapping[str, Any]) -> int | None:
    length = first_of(text_config(config), "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    return length if isinstance(length, int) else None


def _parts(cost: Cost) -> tuple[PartCost, ...]:
    found = [(name, cost.parts[name]) for name in PARTS if cost.parts[name].nbytes]
    return tuple(PartCost(name, part.parameters, part.nbytes, part.bits_per_weight) for name, part in found)


def _kv(
    planned: KVTable | str, config: Mapping[str, Any], spec: KVSpec, context: int, value_bytes: int
) -> tuple[int | None, int | None]:
    """Return (bytes a token, bytes at this context): as planned, else from the config; None where that does not say either.

    Raises OptionError for flags that the model's caches can't take.
    """
    if isinstance(planned, KVTable) and planned.bytes_at_context is not None:
        return planned.bytes_per_token, planned.bytes_at_context
    layers = kv_cost.kv_layers(config)
    if layers is None:
        return None, None
    if (spec.quantized or spec.window is not None) and not all(layer.free for layer in layers):
        raise OptionError("this model's caches can be neither packed nor bounded", "Leave out the KV flags.")
    from tokamac.engine.kv.plan import spare_slots

    return (
        kv_cost.kv_bytes_per_token(layers, spec, value_bytes=value_bytes),
        kv_cost.kv_bytes(layers, spec, context, value_bytes=value_bytes, spare=spare_slots),
    )
