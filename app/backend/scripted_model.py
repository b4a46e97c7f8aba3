"""What the scripted engine pretends to run: four billion weights at 4.5 bits on a chip of the table, as arithmetic alone."""

from dataclasses import replace

from tokamac.engine.limits.attention_work import Attention, Heads
from tokamac.engine.limits.fitted import fitted
from tokamac.engine.limits.hardware import lookup
from tokamac.engine.limits.situation import Situation
from tokamac.engine.limits.work import KVLayer, Work

WEIGHT_BYTES = 2_263_000_000
KV_BYTES_PER_TOKEN = 147_456
LAYERS = 36
HEADS = Heads(queries=32, keys=8, key_dim=128, value_dim=128)
CHIP = lookup("Apple M2 Ultra", 76)
PACE = fitted(CHIP)
WORK = Work(
    traits=("dense",),
    layers=LAYERS,
    hidden=2560,
    launches=600,
    shared_bytes=WEIGHT_BYTES,
    expert_bytes=0,
    active=0.0,
    prefill_parameters=3_633_000_000,
    head_parameters=389_000_000,
    kv=(KVLayer(KV_BYTES_PER_TOKEN // LAYERS, None, 0, HEADS),) * LAYERS,
    attention=(Attention(32 * 256, None),) * LAYERS,
    products=(),
    query_heads=32,
    vocabulary=151_936,
)
PACKED_KV = tuple(replace(layer, bytes_per_token=round(layer.bytes_per_token * 8.5 / 16)) for layer in WORK.kv)
SITUATION = Situation(packed_kv=PACKED_KV, bits_per_weight=4.5, keeps_prompts=True, chunk=512)
