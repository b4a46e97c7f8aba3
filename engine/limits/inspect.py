"""The answer to "can I run this, and how fast?" for one model in one case: from config and headers, no weight is read."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokamac.engine.context_length import context_length
from tokamac.engine.device import device_kind
from tokamac.engine.errors import ModelUnsupportedError
from tokamac.engine.limits import memory
from tokamac.engine.limits.bare_cost import bare_cost
from tokamac.engine.limits.cost import PARTS, Cost, Form, cost_of_folder, text_config
from tokamac.engine.limits.family import Trait, traits_of
from tokamac.engine.limits.hardware import Chip, detect
from tokamac.engine.limits.kv_cost import value_bytes_of
from tokamac.engine.limits.kv_table import KVTable
from tokamac.engine.limits.memory import Fit
from tokamac.engine.limits.outcomes import KV_UNKNOWN, Case, load, outcome_at
from tokamac.engine.limits.part_names import PartName
from tokamac.engine.limits.places import Place, here
from tokamac.engine.limits.prediction import Prediction
from tokamac.engine.limits.subject import Known, Subject, subject_of_folder
from tokamac.engine.limits.weighing import form_on, weigh
from tokamac.engine.options import KVSpec


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
    as stored; ``form`` says how the engine holds the weights there, and bytes_per_step, the speeds and memory are of that form: a
    plain CPU unpacks small models to float32. kv_bytes_per_token: while no window is full. kv_table: layer by layer, or None and
    kv_reason why not; KV bytes are then counted from the config alone. prediction: both phases on the roofline.
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
    case: Case
    place: Place
    context_length: int | None
    memory: Fit
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
            "bandwidth_source": chip.source,
            "reason": self.reason,
        }


def inspect_model(
    folder: Path, context: int = 4096, kv: KVSpec | None = None, *, place: Place | None = None
) -> Inspection:
    """Return what the model in ``folder`` costs with a prompt that fills a context of so many tokens. Raises like ``inspect``."""
    return inspect(subject_of_folder(folder), Case(kv=kv or KVSpec(), context=context, prompt=context), place)


def inspect(subject: Subject, case: Case, place: Place | None = None) -> Inspection:
    """Return what a model costs in a case.

    place: None takes this machine, measuring its bandwidth where no table knows it. Raises ModelError for a model that is damaged
    or can't be weighed at all, and OptionError for a flag that it can't take.
    """
    packing = case.packing(subject.packing)
    at = place or _bare()
    weighed = weigh(
        subject.config, at.device, at.memory_bytes, packing=packing, folder=subject.folder, adapter=subject.adapter
    )
    if isinstance(weighed, str):
        if subject.adapter is not None:
            raise ModelUnsupportedError(f"{subject.name} can't be weighed with an adapter: {weighed}", "Leave it out.")
        return _of_headers(subject, case, place, weighed)
    loaded = load(weighed, case.kv, _sized(place, weighed.held))
    table = loaded.kv_table(case.context)
    if table.bytes_at_context is None:
        return _of_bytes(subject, case, loaded.place, weighed.stored, weighed.held, weighed.form, kv_table=table)
    found = outcome_at(loaded, case)
    assert found.memory is not None
    return replace(
        _described(subject, case, loaded.place, weighed.stored, weighed.form, found.memory),
        kv_bytes_per_token=table.bytes_per_token,
        kv_bytes=found.kv_bytes,
        bytes_per_step=found.prediction.decode.bytes_read if found.prediction else None,
        ceiling_tps=found.ceiling_tps,
        expected_tps=found.expected_tps,
        prefill_tps=found.prefill_tps,
        ttft_s=found.ttft_s,
        reason=found.reason,
        prediction=found.prediction,
        kv_table=table,
    )


def _of_headers(subject: Subject, case: Case, place: Place | None, why: str) -> Inspection:
    """Return what the files alone say of a model that no class here makes."""
    if subject.folder is None or case.bits is not None:
        raise ModelUnsupportedError(
            f"{subject.name} can't be weighed: {why}", "Inspect it with its weights, as they are."
        )
    at = place or _bare()
    stored = cost_of_folder(subject.folder, subject.config)
    form = form_on(stored, at.device, at.memory_bytes)
    held = cost_of_folder(subject.folder, subject.config, form=form)
    return _of_bytes(subject, case, _sized(place, held), stored, held, form, kv_reason=why)


def _of_bytes(  # noqa: PLR0917
    subject: Subject,
    case: Case,
    place: Place,
    stored: Cost,
    held: Cost,
    form: Form,
    *,
    kv_table: KVTable | None = None,
    kv_reason: str | None = None,
) -> Inspection:
    value_bytes = value_bytes_of(subject.config) if form == "stored" else 4
    bare = bare_cost(subject.config, held, case, place, value_bytes=value_bytes)
    return replace(
        _described(subject, case, place, stored, form, bare.memory),
        kv_bytes_per_token=bare.kv_bytes_per_token,
        kv_bytes=bare.kv_bytes,
        bytes_per_step=bare.bytes_per_step,
        ceiling_tps=bare.ceiling_tps,
        reason=kv_reason or KV_UNKNOWN,
        kv_table=kv_table,
        kv_reason=kv_reason,
    )


def _described(  # noqa: PLR0917
    subject: Subject, case: Case, place: Place, stored: Cost, form: Form, fit: Fit
) -> Inspection:
    """Return an inspection that says what the model is and whether it fits, and nothing yet of its speed."""
    config = subject.config
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else text_config(config).get("model_type", "unknown")
    parts = ((name, stored.parts[name]) for name in PARTS if stored.parts[name].nbytes)
    return Inspection(
        model=subject.name,
        architecture=str(named),
        traits=traits_of(config),
        known=subject.known,
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


def _bare() -> Place:
    """Return as much of this machine as weighing needs: its device and memory, without a bandwidth."""
    return Place(detect(), memory.device_total(), None, None, device_kind(), local=True)


def _sized(place: Place | None, held: Cost) -> Place:
    """Return the place, or this machine, with its bandwidth for weights that are held so."""
    bytes_read = held.weight_bytes_per_token or held.weight_bytes
    return here(bytes_read) if place is None else place.reading(bytes_read)
