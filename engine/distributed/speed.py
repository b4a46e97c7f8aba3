"""What a model needs on each of several like machines, and how fast a token is to be expected: arithmetic, before any is bought.

    tensor      a token = bytes a node reads ÷ its bandwidth + messages × (hops × latency + bytes of a message ÷ link rate)
                messages = 2 a layer, after attention and after the feed-forward part, and one for the token itself
    pipeline    the nodes work in turn: a token = the time on one machine + messages × (latency + bytes ÷ link rate)
                messages = one from each node to the next

Each node holds the embedding, the head and the norms whole. hops: a sum over N nodes passes N − 1 others.
"""

from dataclasses import dataclass, replace

from ..errors import OptionError
from ..metrics import rate
from ..options import Split
from ..perf.cost import Cost, PartName
from ..perf.footprint import weigh
from ..perf.inspection import ModelRef
from ..perf.machine import Machine
from ..perf.memory import MemoryFit
from ..perf.what_if import WhatIfCase, load
from ..perf.workload import KVUse, Workload

DIVIDED: tuple[PartName, ...] = ("attention", "mlp", "experts")
"""Parts of a model of which a node has a share."""
MESSAGES_A_LAYER = 2


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """What joins two machines. gbits: a second and direction, nominal. latency_s: until a short message is there; None is unknown.

    source: who says so.
    """

    name: str
    gbits: float | None
    latency_s: float | None
    source: str


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
"""Links by the name of the flag."""


@dataclass(frozen=True, slots=True)
class NodesOutcome:
    """A case on several like machines. Bytes of one node; seconds of a token; None is unknown, and ``reason`` says why.

    reading_s: expected of a node's own work, linking_s: of all messages.
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
        """Tokens a second."""
        known = self.reading_s is not None and self.linking_s is not None
        return rate(1, (self.reading_s or 0.0) + (self.linking_s or 0.0)) if known else None


def on_nodes(
    ref: ModelRef, case: WhatIfCase, place: Machine, nodes: int, *, split: Split, link: LinkSpec
) -> NodesOutcome:
    """Return what a model makes of ``nodes`` machines like ``place``. Raises OptionError where it can't be weighed."""
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
    """Return the work of one node, where layers are split."""
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
    """Return what one node has of a cache: some of its heads; of one without heads, latent or a state, all."""
    heads = layer.heads
    if heads is None or heads.keys % nodes:
        return layer
    own = replace(heads, keys=heads.keys // nodes, queries=heads.queries // nodes)
    return replace(layer, bytes_per_token=layer.bytes_per_token // nodes, heads=own)
