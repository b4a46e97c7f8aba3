"""What the engine would plan for a model that is only known by its config."""

from collections.abc import Mapping
from typing import Any

from tokamac.engine.kv import plan_caches
from tokamac.engine.model.skeleton import skeleton_model
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.footprint import KVTable, table_of_plan


def kv_table(config: Mapping[str, Any], spec: KVSpec, context: int, *, value_bytes: int) -> KVTable:
    """The caches of the model of a normalised config. value_bytes: of a number in the type that the engine holds it in."""
    return table_of_plan(plan_caches(skeleton_model(config, value_bytes), config, spec), context)
