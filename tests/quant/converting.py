"""Converting and looking at what came of it, in few words."""

import json

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as mlx_lm_load_model

from tests.quant.quant_models import make_source, names_in
from tokamac.engine.model.config import read_config
from tokamac.quant import convert

TOKENS = mx.array([[5, 4, 3, 2, 1, 7, 7, 9]])
MODES = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def run(source, out, **options):
    """Convert by rounding, so that every weight is what MLX makes of it."""
    how = {} if options.get("dequantize") else {"method": "round"}
    return convert(source, out, verify=False, **how, **options)


def refuse(error, source, match):
    """Converting must raise before any work."""
    with pytest.raises(error, match=match) as caught:
        run(source, source.parent / "out")
    assert "out" not in names_in(source.parent)
    assert caught.value.hint
    return caught.value


def logits(folder):
    """Return what mlx-lm makes of a folder, its config in today's form."""
    return mlx_lm_load_model(folder, model_config=read_config(folder))[0](TOKENS)


def same(a, b):
    return bool(mx.array_equal(a.astype(mx.float32), b.astype(mx.float32)).item())


def arrays_of(folder):
    return {name: array for file in folder.glob("*.safetensors") for name, array in mx.load(str(file)).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def packed_folder(tmp_path, kind="llama", mode="affine", **more):
    """Return an MLX folder, packed by us."""
    bits, group = MODES[mode]
    run(make_source(tmp_path, kind), tmp_path / "packed", bits=bits, group_size=group, mode=mode, **more)
    return tmp_path / "packed"
