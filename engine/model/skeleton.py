"""An mlx-lm model with broadcast zeros for weights, like PyTorch's meta device.

Nothing of the weights' size is ever computed, so a model of any size takes no memory and well under a millisecond a layer, and
can be asked which tensors it has, which layers it packs and which caches it wants.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ..errors import ModelDamagedError, ModelUnsupportedError


def skeleton_model(config: Mapping[str, Any], value_bytes: int, *, unchecked: bool = False) -> Any:
    """Return mlx-lm's module for a normalised config (engine/model/config.py), not packed, all zeros.

    value_bytes: of a floating number: 4 is float32, 2 is bfloat16. unchecked: also what the rule for configs doubts.
    Raises ModelUnsupportedError for a config that no class reads whole, ModelDamagedError for one that makes no model.
    """
    import mlx.core as mx
    from mlx.utils import tree_map

    from .config import model_classes
    from .config_rules import check_config
    from .loader import BUILD_ERRORS

    own = deepcopy(dict(config))  # mlx-lm's classes write into what they are given
    make, arguments = model_classes(own)
    if not unchecked:
        check_config(own, arguments)
    dtype = mx.float32 if value_bytes == 4 else mx.bfloat16

    def zeros(array: mx.array) -> mx.array:
        kept = dtype if mx.issubdtype(array.dtype, mx.floating) else array.dtype
        return mx.broadcast_to(mx.zeros((), kept), array.shape)

    try:
        model: Any = make(arguments.from_dict(own))
        model.update(tree_map(zeros, model.parameters()))
    except ImportError as error:
        raise ModelUnsupportedError(f"it needs a package that is not installed: {error}", "Install it.") from error
    except BUILD_ERRORS as error:
        reason = " ".join(str(error).split())[:240]
        raise ModelDamagedError(f"its config does not make a model: {reason}", "Download it again.") from error
    return model
