"""Answers "can I run this, and how fast?" from config and headers."""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..device import device_kind
from ..errors import ModelNotFoundError, ModelUnsupportedError, OptionError, TokamacError
from ..events import RoundingCost
from ..metrics import rate
from ..model.adapters import Adapter
from ..model.config import context_length, read_config
from ..model.safetensors import INDEX, PICKLES, weight_files
from ..model.weights import StoredHeads, find_heads, text_config
from ..options import KVSpec, Split
from ..vision.families import FAMILIES
from . import config_cost, memory
from .catalogue import CatalogueEntry, Repository, find
from .config_cost import Packing, leaves_out_senses, traits_of, value_bytes_of
from .cost import PARTS, Cost, Form, PartName, cost_of_folder, first_of
from .footprint import Footprint, KVTable, form_on, weigh
from .hardware import Chip, detect
from .memory import MemoryFit
from .roofline import KVUse, Prediction, Trait, Workload, limits_for
from .what_if import (
    KV_UNKNOWN,
    Machine,
    Verdict,
    WhatIfCase,
    WhatIfOutcome,
    here,
    load,
    outcome_at,
    outcome_of,
    reason_of,
    verdict_of,
)

# Without a cache plan, KV is counted from the config and the ceiling from bytes alone.


Known = Literal["files", "config", "catalogue"]

# Prompt tokens computed at once, for a rough estimate of temporaries; the engine's own is of this order on every
# device.
CHUNK = 512


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A model to weigh: by folder, config or catalogue."""

    name: str
    config: Mapping[str, Any]
    known: Known
    packing: Packing | None = None
    folder: Path | None = None
    adapter: Adapter | None = None


def model_ref(model: str | Path) -> ModelRef:
    """Resolve without downloading. Raises ModelNotFoundError, ModelDamagedError, ModelUnsupportedError."""
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
    """Raises ModelNotFoundError, ModelDamagedError; weights are checked when weighed."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder} is not a folder", "Name a model folder, a Hugging Face id, or `guide`.")
    config = read_config(folder)
    weights = any(
        True for pattern in ("model*.safetensors", "model*.gguf", INDEX, *PICKLES) for _ in folder.glob(pattern)
    )
    return ModelRef(name or str(folder), config, "files" if weights else "config", folder=folder if weights else None)


def model_ref_of_entry(entry: CatalogueEntry, repository: Repository | None) -> ModelRef:
    """Raises ModelUnsupportedError without a config."""
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
    part: PartName
    parameters: int
    bytes: int
    bits_per_weight: float | None


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model on a machine; None is unknown, see ``reason``.

    weight_bytes, bits_per_weight, parts: as stored; the rest in ``form`` (unpacked is float32 on a CPU).
    kv_bytes_per_token: while no window is full. memory includes draft and usable heads.
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
    expected_range: tuple[float, float] | None = None
    prefill_tps: float | None = None
    ttft_s: float | None = None
    reason: str | None = None
    prediction: Prediction | None = None
    kv_table: KVTable | None = None
    kv_reason: str | None = None
    draft: "Inspection | None" = None
    heads: tuple[StoredHeads, ...] = ()
    rounding: RoundingCost | None = None
    picture: tuple[int, int, int] | None = None

    @property
    def draft_step(self) -> float | None:
        if self.draft is None:
            return None
        if self.expected_tps and self.draft.expected_tps:
            return self.expected_tps / self.draft.expected_tps
        return (self.draft.bytes_per_step or 0) / self.bytes_per_step if self.bytes_per_step else None

    @property
    def chip(self) -> Chip:
        return self.place.chip

    @property
    def context(self) -> int:
        return self.case.context

    def to_json(self) -> dict[str, Any]:
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
            "picture_tokens": None
            if self.picture is None
            else dict(zip(("tokens", "least", "most"), self.picture, strict=True)),
            "rounding": None if self.rounding is None else {**asdict(self.rounding), "rounded": self.rounding.is_small},
        }


def inspect_model(
    folder: Path, context: int = 4096, kv: KVSpec | None = None, *, place: Machine | None = None
) -> Inspection:
    """Inspect a folder at ``context`` tokens. Raises like ``inspect``."""
    return inspect(model_ref_of_folder(folder), WhatIfCase(kv=kv or KVSpec(), context=context, prompt=context), place)


def inspect(ref: ModelRef, case: WhatIfCase, place: Machine | None = None) -> Inspection:
    """Inspect a case; place None measures this machine if needed. Raises ModelError, OptionError."""
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
        expected_range=outcome.expected_range,
        prefill_tps=outcome.prefill_tps,
        ttft_s=outcome.ttft_s,
        reason=outcome.reason,
        prediction=outcome.prediction,
        kv_table=table,
        rounding=_rounding(ref, case, loaded.place),
        picture=_picture(ref),
    )


def _picture(ref: ModelRef) -> tuple[int, int, int] | None:
    if ref.folder is None or ref.config.get("model_type") not in FAMILIES:
        return None
    from ..vision.eyes import tokens_of_pictures

    return tokens_of_pictures(ref.folder, ref.config)


def with_heads(found: Inspection, folder: Path, config: Mapping[str, Any]) -> Inspection:
    heads, own = find_heads(folder, config), found.memory
    more = sum(each.held_bytes(floats=found.form == "float32") for each in heads if not each.trouble)
    fit = own if not more else found.place.fit(weights=own.weights + more, kv=own.kv, working=own.working)
    return replace(found, memory=fit, heads=heads)


def _rounding(ref: ModelRef, case: WhatIfCase, place: Machine) -> RoundingCost | None:
    if ref.folder is None or case.bits is not None or not place.local or place.device != "cpu":
        return None
    from ..cpu import cost_key, known_cost
    from ..prompt_cache.folder import default_root, known_digest

    with contextlib.suppress(OSError):
        weights = known_digest(weight_files(ref.folder), default_root())
        return None if weights is None else known_cost(cost_key(ref.folder, weights))
    return None


def with_draft(found: Inspection, draft: Inspection) -> Inspection:
    own, other = found.memory, draft.memory
    fit = found.place.fit(
        weights=own.weights + other.weights, kv=own.kv + other.kv, working=max(own.working, other.working)
    )
    return replace(found, memory=fit, draft=draft)


def _of_headers(ref: ModelRef, case: WhatIfCase, place: Machine | None, why: str) -> Inspection:
    if ref.folder is None or case.bits is not None:
        raise ModelUnsupportedError(f"{ref.name} can't be weighed: {why}", "Inspect it with its weights, as they are.")
    at = place or _this_device()
    stored = cost_of_folder(ref.folder, ref.config)
    form = form_on(at.device)
    held = cost_of_folder(ref.folder, ref.config, form=form)
    return replace(_of_bytes(ref, case, _sized(place, held), stored, held, form), reason=why, kv_reason=why)


def _of_bytes(ref: ModelRef, case: WhatIfCase, place: Machine, stored: Cost, held: Cost, form: Form) -> Inspection:  # noqa: PLR0917
    """Inspect without a cache plan; unknown KV counts as 0. Raises OptionError."""
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
    text = text_config(config)
    hidden = int(first_of(text, "hidden_size", "n_embd") or 0)
    used = int(first_of(text, "num_experts_per_tok", "num_experts_per_token") or 1)
    dense = int(first_of(text, "intermediate_size", "n_inner") or 4 * hidden)
    width = max(dense, used * int(text.get("moe_intermediate_size") or 0))
    return CHUNK * value_bytes * (3 * width + 5 * hidden) + 4 * int(text.get("vocab_size") or 0)


def _kv_bytes(config: Mapping[str, Any], spec: KVSpec, context: int, value_bytes: int) -> tuple[int | None, int | None]:
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
    return Machine(detect(), memory.device_total(), None, None, device_kind(), local=True)


def _sized(place: Machine | None, held: Cost) -> Machine:
    bytes_read = held.weight_bytes_per_token or held.weight_bytes
    return here(bytes_read) if place is None else place.reading(bytes_read)


@dataclass(frozen=True, slots=True)
class Prospect:
    model: str
    parameters: int | None
    active_parameters: int | None
    outcome: WhatIfOutcome
    verdict: Verdict
    reason: str
    text_only: bool = False


def prospect(model: str, case: WhatIfCase, place: Machine) -> Prospect:
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
        text_only=footprint is not None
        and leaves_out_senses(footprint.config)
        and footprint.config.get("model_type") not in FAMILIES,
    )


#     tensor      a token = bytes a node reads ÷ its bandwidth + messages × (hops × latency + message bytes ÷ link rate)
#                 messages = 2 a layer (after attention and feed-forward) + 1 for the token
#     pipeline    a token = time on one machine + messages × (latency + bytes ÷ link rate); messages = N − 1
#
# Every node holds embedding, head and norms whole. A sum over N nodes takes N − 1 hops.


DIVIDED: tuple[PartName, ...] = ("attention", "mlp", "experts")  # parts of a model of which a node has a share
MESSAGES_A_LAYER = 2


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A link. gbits: nominal Gbit/s per direction. latency_s: of a short message; None if unknown."""

    name: str
    gbits: float | None
    latency_s: float | None
    source: str


# Links by the name of the flag.
LINKS = {
    "thunderbolt5": LinkSpec(
        "Thunderbolt 5",
        80.0,
        50e-6,
        "80 Gb/s: Intel's announcement of Thunderbolt 5 (2023); less than 50 µs with RDMA (300 µs with TCP): Jeff Geerling, "
        "1.5 TB of VRAM on Mac Studio (2025). Not measured here",
    ),
    "ethernet": LinkSpec(
        "10 Gb Ethernet", 10.0, None, "10 Gb/s: IEEE 802.3an. Its latency under MLX is not known here"
    ),
}


@dataclass(frozen=True, slots=True)
class NodesOutcome:
    """A case on several equal machines: bytes per node, seconds per token; None with a ``reason``.

    reading_s: a node's own work; linking_s: all messages.
    """

    nodes: int
    split: Split
    link: LinkSpec
    memory: MemoryFit
    read_bytes: int
    messages: int
    message_bytes: int
    reading_s: float | None
    linking_s: float | None
    ceiling_tps: float | None
    reason: str = ""

    @property
    def expected_tps(self) -> float | None:
        known = self.reading_s is not None and self.linking_s is not None
        return rate(1, (self.reading_s or 0.0) + (self.linking_s or 0.0)) if known else None


def on_nodes(
    ref: ModelRef, case: WhatIfCase, place: Machine, nodes: int, *, split: Split, link: LinkSpec
) -> NodesOutcome:
    """Predict a model on ``nodes`` machines like ``place``. Raises OptionError where it can't be weighed."""
    weighed = weigh(ref.config, place.device, packing=case.packing(ref.packing), folder=ref.folder, adapter=ref.adapter)
    if isinstance(weighed, str):
        raise OptionError(weighed, "Choose another model.")
    loaded = load(weighed, case.kv, place)
    alone, whole, hidden = loaded.fit(case), loaded.work, loaded.work.hidden
    if hidden is None:
        raise OptionError("the width of this model is not known", "Choose another model.")
    held, work = weighed.held, whole
    divided = sum(held.parts[name].nbytes for name in DIVIDED)
    memory = place.fit(
        weights=held.weight_bytes - divided + -(-divided // nodes),
        kv=-(-alone.kv // nodes),
        working=alone.working,
    )
    value_bytes = 4 if place.device == "cpu" else 2
    if split == "tensor":
        work, messages, hops = _share_of(whole, held, nodes), MESSAGES_A_LAYER * whole.layers + 1, nodes - 1
    else:
        messages, hops = nodes, 1
    read, bandwidth = work.step_bytes(case.context), place.chip.bandwidth_gbs
    if read is None:
        raise OptionError("this model does not say what a token reads of it", "Choose another model.")
    latency = None if loaded.latency is None else loaded.latency.decode_s(work, case.context)
    linking = None
    if link.latency_s is not None and link.gbits is not None:
        linking = messages * (hops * link.latency_s + hidden * value_bytes * 8 / (link.gbits * 1e9))
    reason = "" if linking is not None else "the link's latency is not known: measure it, and give --link-latency"
    if latency is None:
        reason = "the speed of this machine is not known"
    return NodesOutcome(
        nodes=nodes,
        split=split,
        link=link,
        memory=memory,
        read_bytes=read,
        messages=messages,
        message_bytes=hidden * value_bytes,
        reading_s=latency,
        linking_s=linking,
        ceiling_tps=None if bandwidth is None else rate(bandwidth * 1e9, read),
        reason=reason,
    )


def _share_of(work: Workload, held: Cost, nodes: int) -> Workload:
    shared = sum(held.parts[name].nbytes_per_token for name in DIVIDED if name != "experts")
    parameters = work.prefill_parameters
    return replace(
        work,
        shared_bytes=work.shared_bytes - shared + -(-shared // nodes),
        expert_bytes=-(-work.expert_bytes // nodes),
        prefill_parameters=None if parameters is None else -(-parameters // nodes),
        kv=tuple(_cache_share(layer, nodes) for layer in work.kv),
    )


def _cache_share(layer: KVUse, nodes: int) -> KVUse:
    heads = layer.heads
    if heads is None or heads.keys % nodes:
        return layer
    own = replace(heads, keys=heads.keys // nodes, queries=heads.queries // nodes)
    return replace(layer, bytes_per_token=layer.bytes_per_token // nodes, heads=own)
