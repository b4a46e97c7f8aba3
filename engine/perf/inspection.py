"""The answer to "can I run this, and how fast?" for one model in one case: from config and headers, no weight is read.

The model may have its files here, only its config, or only a row in the catalogue. Where its caches can't be planned, keys and
values are counted by the config, and the ceiling by the bytes alone.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..device import device_kind
from ..errors import ModelNotFoundError, ModelUnsupportedError, OptionError, TokamacError
from ..model.adapters import Adapter
from ..model.config import context_length, read_config
from ..model.rounding_cost import RoundingCost, cost_key, known_cost
from ..model.safetensors import INDEX, PICKLES
from ..model.stored_heads import StoredHeads, find_heads
from ..options import KVSpec
from . import config_cost, memory
from .catalogue import CatalogueEntry, Repository, find
from .config_cost import Packing, value_bytes_of
from .cost import PARTS, Cost, Form, PartName, cost_of_folder, first_of, text_config
from .footprint import Footprint, KVTable, form_on, weigh
from .hardware import Chip, detect
from .machine import Machine, here
from .memory import MemoryFit
from .model_work import leaves_out_senses, traits_of
from .roofline import Prediction, limits_for
from .what_if import (
    KV_UNKNOWN,
    Verdict,
    WhatIfCase,
    WhatIfOutcome,
    load,
    outcome_at,
    outcome_of,
    reason_of,
    verdict_of,
)
from .workload import Trait

Known = Literal["files", "config", "catalogue"]

CHUNK = 512
"""Prompt tokens computed at once, for a rough estimate of temporaries; the engine's own is of this order on every device."""


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model to weigh. name: as the user knows it; of the catalogue, the repository. config: normalised.

    known: by what it is known. packing: how it is packed, where the config does not say. folder: of its weights, if they are here.
    adapter: added to it.
    """

    name: str
    config: Mapping[str, Any]
    known: Known
    packing: Packing | None = None
    folder: Path | None = None
    adapter: Adapter | None = None


def model_ref(model: str | Path) -> ModelRef:
    """Return the model that a folder, "guide", a Hugging Face id or a name of the catalogue stands for. Downloads nothing.

    Raises ModelNotFoundError, ModelDamagedError, ModelUnsupportedError.
    """
    from ..hub import download

    entry = find(str(model))
    try:
        folder = download.find(model)
    except ModelNotFoundError:
        if entry is None:
            raise
        folder = None
    if folder is not None:
        return model_ref_of_folder(folder, str(model))
    if entry is None:
        raise ModelNotFoundError(
            f"{model} is neither complete on this disk nor in the catalogue",
            f"Download it: tokamac models pull {model}.",
        )
    return model_ref_of_entry(entry, entry.repository(str(model)) or next(iter(entry.repositories), None))


def model_ref_of_folder(folder: Path, name: str | None = None) -> ModelRef:
    """Return the model in a folder, with its weights or without any.

    Raises ModelNotFoundError for no folder, ModelDamagedError for one without a config. Whether weights are whole is seen when they
    are weighed.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder", "Name a model folder, a Hugging Face id, or `guide`.")
    config = read_config(folder)
    weights = any(True for pattern in ("model*.safetensors", INDEX, *PICKLES) for _ in folder.glob(pattern))
    return ModelRef(name or str(folder), config, "files" if weights else "config", folder=folder if weights else None)


def model_ref_of_entry(entry: CatalogueEntry, repository: Repository | None) -> ModelRef:
    """Return a model of the catalogue, as a repository packs it, or in 16 bits.

    Raises ModelUnsupportedError where its config is not known.
    """
    config = entry.config if repository is None else entry.config_of(repository)
    if config is None:
        raise ModelUnsupportedError(
            f"the config of {entry.name} is not known here",
            f"Download it first: tokamac models pull {repository.id if repository else entry.name}.",
        )
    packing = None if repository is None else repository.packing
    return ModelRef(entry.name if repository is None else repository.id, config, "catalogue", packing)


@dataclass(frozen=True, slots=True)
class PartCost:
    """One part of a model: how many weights, in how many bytes, at how many bits each (None where it has none)."""

    part: PartName
    parameters: int
    bytes: int
    bits_per_weight: float | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a model is, and what a place makes of it. Bytes, tokens a second, seconds; None is unknown, and ``reason`` says why.

    known: by what the model is known: its files, its config alone, or the catalogue. weight_bytes, bits_per_weight and parts are
    as stored; ``form`` says how the engine holds the weights there, and bytes_per_step, the speeds and memory are of that form: on
    a plain CPU what is not packed is float32. kv_bytes_per_token: while no window is full. kv_table: layer by layer, or None and
    kv_reason why not; KV bytes are then counted from the config alone. prediction: both phases on the roofline.
    draft: the draft model beside it, whose weights, keys and values are in ``memory``, too.
    heads: the model's own for further tokens, those that can't be used included; the weights of the others are in ``memory``.
    rounding: what rounding costs it on a plain CPU, once it was loaded here; None where that is unknown, or nothing is rounded.
    """

    model: str
    architecture: str
    traits: tuple[Trait, ...]
    known: Known
    parameters: int
    active_parameters: int | None
    weight_bytes: int
    bits_per_weight: float | None
    parts: tuple[PartCost, ...]
    form: Form
    case: WhatIfCase
    place: Machine
    context_length: int | None
    memory: MemoryFit
    kv_bytes_per_token: int | None = None
    kv_bytes: int | None = None
    bytes_per_step: int | None = None
    ceiling_tps: float | None = None
    expected_tps: float | None = None
    prefill_tps: float | None = None
    ttft_s: float | None = None
    reason: str | None = None
    prediction: Prediction | None = None
    kv_table: KVTable | None = None
    kv_reason: str | None = None
    draft: "Inspection | None" = None
    heads: tuple[StoredHeads, ...] = ()
    rounding: RoundingCost | None = None

    @property
    def draft_step(self) -> float | None:
        """Steps of this model that one of its draft model should take; by the bytes that both read, where speeds are unknown."""
        if self.draft is None:
            return None
        if self.expected_tps and self.draft.expected_tps:
            return self.expected_tps / self.draft.expected_tps
        return (self.draft.bytes_per_step or 0) / self.bytes_per_step if self.bytes_per_step else None

    @property
    def chip(self) -> Chip:
        """The chip of the place."""
        return self.place.chip

    @property
    def context(self) -> int:
        """Tokens held while decoding."""
        return self.case.context

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the names of the public contract first, what else is known after them."""
        chip = self.chip
        return {
            "model": self.model,
            "architecture": self.architecture,
            "parameters": self.parameters,
            "weight_bytes": self.weight_bytes,
            "bits_per_weight": self.bits_per_weight,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "bytes_per_step": self.bytes_per_step,
            "chip": {
                "name": chip.name,
                "gpu_cores": chip.gpu_cores,
                "bandwidth_gbs": chip.bandwidth_gbs,
                "fp16_tflops": chip.fp16_tflops,
            },
            "ceiling_tps": self.ceiling_tps,
            "expected_tps": self.expected_tps,
            "prefill_tps": self.prefill_tps,
            "ttft_s": self.ttft_s,
            "memory": asdict(self.memory),
            "known_by": self.known,
            "families": list(self.traits),
            "active_parameters": self.active_parameters,
            "parts": [asdict(part) for part in self.parts],
            "form": self.form,
            "context": self.case.context,
            "prompt": self.case.prompt,
            "context_length": self.context_length,
            "heads": [
                {
                    "kind": each.kind,
                    "count": each.count,
                    "bytes": each.nbytes,
                    "trouble": each.trouble or None,
                    "gain": None,
                }
                for each in self.heads
            ],
            "bandwidth_source": chip.source,
            "bandwidth_condition": chip.condition or None,
            "reason": self.reason,
            "rounding": None if self.rounding is None else {**asdict(self.rounding), "rounded": self.rounding.is_small},
        }


def inspect_model(
    folder: Path, context: int = 4096, kv: KVSpec | None = None, *, place: Machine | None = None
) -> Inspection:
    """Return what the model in ``folder`` costs with a prompt that fills ``context`` tokens. Raises like ``inspect``."""
    return inspect(model_ref_of_folder(folder), WhatIfCase(kv=kv or KVSpec(), context=context, prompt=context), place)


def inspect(ref: ModelRef, case: WhatIfCase, place: Machine | None = None) -> Inspection:
    """Return what a model costs in a case.

    place: None takes this machine, measuring its bandwidth where no table knows it. Raises ModelError for a model that is damaged
    or can't be weighed at all, and OptionError for a flag that it can't take.
    """
    packing = case.packing(ref.packing)
    at = place or _this_device()
    weighed = weigh(ref.config, at.device, packing=packing, folder=ref.folder, adapter=ref.adapter)
    if isinstance(weighed, str):
        if ref.adapter is not None:
            raise ModelUnsupportedError(f"{ref.name} can't be weighed with an adapter: {weighed}", "Leave it out.")
        return _of_headers(ref, case, place, weighed)
    loaded = load(weighed, case.kv, _sized(place, weighed.held))
    table = loaded.kv_table(case.context)
    if table.bytes_at_context is None:
        found = _of_bytes(ref, case, loaded.place, weighed.stored, weighed.held, weighed.form)
        return replace(found, kv_table=table)
    outcome = outcome_at(loaded, case)
    assert outcome.memory is not None
    return replace(
        _described(ref, case, loaded.place, weighed.stored, weighed.form, outcome.memory),
        kv_bytes_per_token=table.bytes_per_token,
        kv_bytes=outcome.kv_bytes,
        bytes_per_step=outcome.prediction.decode.bytes_read if outcome.prediction else None,
        ceiling_tps=outcome.ceiling_tps,
        expected_tps=outcome.expected_tps,
        prefill_tps=outcome.prefill_tps,
        ttft_s=outcome.ttft_s,
        reason=outcome.reason,
        prediction=outcome.prediction,
        kv_table=table,
        rounding=_rounding(ref, case, loaded.place),
    )


def with_heads(found: Inspection, folder: Path, config: Mapping[str, Any]) -> Inspection:
    """Return what a model costs with its own heads for further tokens, if its folder has any. What they gain only a reply tells."""
    heads, own = find_heads(folder, config), found.memory
    more = sum(each.held_bytes(floats=found.form == "float32") for each in heads if not each.trouble)
    fit = own if not more else found.place.fit(weights=own.weights + more, kv=own.kv, working=own.working)
    return replace(found, memory=fit, heads=heads)


def _rounding(ref: ModelRef, case: WhatIfCase, place: Machine) -> RoundingCost | None:
    if ref.folder is None or case.bits is not None or not place.local or place.device != "cpu":
        return None
    from ..prompt_cache.folder import default_root, known_digest

    with contextlib.suppress(OSError):
        weights = known_digest(sorted(ref.folder.glob("*.safetensors")), default_root())
        return None if weights is None else known_cost(cost_key(ref.folder, weights))
    return None


def with_draft(found: Inspection, draft: Inspection) -> Inspection:
    """Return what a model costs with a draft model beside it, in the same case at the same place."""
    own, other = found.memory, draft.memory
    fit = found.place.fit(
        weights=own.weights + other.weights, kv=own.kv + other.kv, working=max(own.working, other.working)
    )
    return replace(found, memory=fit, draft=draft)


def _of_headers(ref: ModelRef, case: WhatIfCase, place: Machine | None, why: str) -> Inspection:
    """What the files alone say of a model that no class here makes."""
    if ref.folder is None or case.bits is not None:
        raise ModelUnsupportedError(f"{ref.name} can't be weighed: {why}", "Inspect it with its weights, as they are.")
    at = place or _this_device()
    stored = cost_of_folder(ref.folder, ref.config)
    form = form_on(at.device)
    held = cost_of_folder(ref.folder, ref.config, form=form)
    return replace(_of_bytes(ref, case, _sized(place, held), stored, held, form), reason=why, kv_reason=why)


def _of_bytes(ref: ModelRef, case: WhatIfCase, place: Machine, stored: Cost, held: Cost, form: Form) -> Inspection:  # noqa: PLR0917
    """What the config and the bytes of the weights say of a model whose caches can't be planned.

    An unknown size of keys and values counts as nothing in memory. Raises OptionError for flags that the caches can't take.
    """
    value_bytes = value_bytes_of(ref.config) if form == "stored" else 4
    per_token, kept = _kv_bytes(ref.config, case.kv, case.context, value_bytes)
    limits = limits_for(
        case.context, weight_bytes_per_token=held.weight_bytes_per_token, kv_bytes_per_step=kept, chip=place.chip
    )
    working = working_bytes(ref.config, value_bytes=value_bytes)
    fit = place.fit(weights=held.weight_bytes, kv=kept or 0, working=working)
    return replace(
        _described(ref, case, place, stored, form, fit),
        kv_bytes_per_token=per_token,
        kv_bytes=kept,
        bytes_per_step=limits.bytes_per_step,
        ceiling_tps=limits.ceiling_tps,
        reason=KV_UNKNOWN,
    )


def working_bytes(config: Mapping[str, Any], *, value_bytes: int = 2) -> int:
    """Return a rough size of the largest temporaries of one layer's prefill chunk, and the logits of one token.

    The widest layer's activations three times over (gate, up and their product), the residual twice, queries, keys and values.
    """
    text = text_config(config)
    hidden = int(first_of(text, "hidden_size", "n_embd") or 0)
    used = int(first_of(text, "num_experts_per_tok", "num_experts_per_token") or 1)
    dense = int(first_of(text, "intermediate_size", "n_inner") or 4 * hidden)
    width = max(dense, used * int(text.get("moe_intermediate_size") or 0))
    return CHUNK * value_bytes * (3 * width + 5 * hidden) + 4 * int(text.get("vocab_size") or 0)


def _kv_bytes(config: Mapping[str, Any], spec: KVSpec, context: int, value_bytes: int) -> tuple[int | None, int | None]:
    """(bytes a token, bytes at this context); None where the config does not say."""
    from ..kv.plan import spare_slots

    layers = config_cost.kv_layers(config)
    if layers is None:
        return None, None
    if (spec.quantized or spec.window is not None) and not all(layer.free for layer in layers):
        raise OptionError("this model's caches can be neither packed nor bounded", "Leave out the KV flags.")
    kept = config_cost.kv_bytes(layers, spec, context, value_bytes=value_bytes, spare=spare_slots)
    kept += config_cost.pinned_bytes(layers, spec, context, value_bytes=value_bytes)
    return config_cost.kv_bytes_per_token(layers, spec, value_bytes=value_bytes), kept


def _described(  # noqa: PLR0917
    ref: ModelRef, case: WhatIfCase, place: Machine, stored: Cost, form: Form, fit: MemoryFit
) -> Inspection:
    """What the model is and whether it fits, and nothing yet of its speed."""
    config = ref.config
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else text_config(config).get("model_type", "unknown")
    parts = ((name, stored.parts[name]) for name in PARTS if stored.parts[name].nbytes)
    return Inspection(
        model=ref.name,
        architecture=str(named),
        traits=traits_of(config),
        known=ref.known,
        parameters=stored.parameters,
        active_parameters=stored.active_parameters,
        weight_bytes=stored.weight_bytes,
        bits_per_weight=stored.bits_per_weight,
        parts=tuple(PartCost(name, part.parameters, part.nbytes, part.bits_per_weight) for name, part in parts),
        form=form,
        case=case,
        place=place,
        context_length=context_length(config),
        memory=fit,
    )


def _this_device() -> Machine:
    """As much of this machine as weighing needs: its device and memory, without a bandwidth."""
    return Machine(detect(), memory.device_total(), None, None, device_kind(), local=True)


def _sized(place: Machine | None, held: Cost) -> Machine:
    """The place, or this machine, with its bandwidth for weights that are held so."""
    bytes_read = held.weight_bytes_per_token or held.weight_bytes
    return here(bytes_read) if place is None else place.reading(bytes_read)


@dataclass(frozen=True, slots=True)
class Prospect:
    """A model at a place. None is unknown. parameters: all weights; active_parameters: those a token uses. reason: one sentence.

    text_only: it sees or hears, too, and that is left out.
    """

    model: str
    parameters: int | None
    active_parameters: int | None
    outcome: WhatIfOutcome
    verdict: Verdict
    reason: str
    text_only: bool = False


def prospect(model: str, case: WhatIfCase, place: Machine) -> Prospect:
    """Return what ``place`` makes of a folder or an id that is on disk. A context longer than the model's own is cut to that.

    Never raises for what the model is: one that can't be weighed is unknown, and the reason says why.
    """
    footprint: Footprint | None = None
    try:
        ref = model_ref(model)
        context = min(case.context, context_length(ref.config) or case.context)
        case = replace(case, context=context, prompt=min(case.prompt, context))
        weighed = weigh(ref.config, place.device, packing=ref.packing, folder=ref.folder)
        found = outcome_of(weighed, case, place)
        footprint = weighed if isinstance(weighed, Footprint) else None
    except TokamacError as error:
        found = WhatIfOutcome(case, place, reason=error.message)
    except Exception as error:  # a config may hold anything, and one must not take the others of a list with it
        found = WhatIfOutcome(case, place, reason=f"its config is not understood ({type(error).__name__})")
    verdict = verdict_of(found)
    return Prospect(
        model=model,
        parameters=footprint.stored.parameters if footprint else None,
        active_parameters=footprint.stored.active_parameters if footprint else None,
        outcome=found,
        verdict=verdict,
        reason=reason_of(found, verdict),
        text_only=footprint is not None and leaves_out_senses(footprint.config),
    )
