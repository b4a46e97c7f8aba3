"""Models that see, converted: the same eyes beside packed words, and mlx-lm reads the words alone."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from tests.engine.inside import runtime_of
from tests.engine.vision.test_families import build, messages
from tests.golden.vision import picture
from tokamac.engine import Engine, OptionError, Sampling
from tokamac.engine.model.weights import VISION_FILE
from tokamac.engine.vision.eyes import ShownPicture
from tokamac.engine.vision.picture import Picture, extent
from tokamac.quant import convert

pytest.importorskip("PIL")
HOW = {"bits": 8, "group_size": 32, "method": "round", "verify": False}


def seen(folder):
    """Return a picture's features, and a reply after it."""
    with Engine.load(folder, dtype="float32", prompt_cache=None) as engine:
        eyes, shown = runtime_of(engine).eyes, Picture.of(picture("alpha"))
        own = ShownPicture(shown, eyes.family.plan(*extent(shown)), ())
        features = engine.run(lambda _: np.array(eyes.features(own)))
        events = list(engine.generate(messages("one"), Sampling(temperature=0, max_tokens=4)))
        return features, events[-1].text


@pytest.mark.parametrize("case", ["gemma3", "qwen3_vl"])
def test_a_converted_model_sees_as_its_source(case, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    build(case, source)
    plan = convert(source, tmp_path / "once", dry_run=True, **HOW)
    convert(source, tmp_path / "once", **HOW)
    files = [each for each in (tmp_path / "once").iterdir() if each.name not in ("README.md", "conversion.json")]
    assert sum(each.stat().st_size for each in files) == plan.output_bytes
    assert VISION_FILE in set(
        json.loads((tmp_path / "once/model.safetensors.index.json").read_text())["weight_map"].values()
    )
    convert(tmp_path / "once", tmp_path / "again", vision_bits=8, **HOW)
    convert(tmp_path / "again", tmp_path / "kept", **HOW)
    convert(tmp_path / "again", tmp_path / "floats", dequantize=True, verify=False)
    expected, _ = seen(source)
    found, reply = seen(tmp_path / "once")
    assert np.array_equal(found, expected)
    assert reply
    packed, _ = seen(tmp_path / "again")
    assert 0 < np.abs(packed - expected).max() < 0.05 * np.abs(expected).max()
    assert (tmp_path / "again" / VISION_FILE).read_bytes() == (tmp_path / "kept" / VISION_FILE).read_bytes()
    config = json.loads((tmp_path / "kept/config.json").read_text())
    stored = mx.load(str(tmp_path / "kept" / VISION_FILE))
    scaled = {name.removesuffix(".scales") for name in stored if name.endswith(".scales")}
    assert scaled
    usual = (config["quantization"]["bits"], config["quantization"]["group_size"])
    for path in scaled:  # how each is packed stands in the config, for mlx-vlm
        own = config["quantization"].get(path, config["quantization"])
        assert (own["bits"], own["group_size"]) == usual == (8, 32)
    assert not any(name.endswith(".scales") for name in mx.load(str(tmp_path / "floats" / VISION_FILE)))
    load_model(tmp_path / "kept")


def test_what_is_asked_of_eyes_that_are_not_there_is_refused(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    build("gemma3", source)
    convert(source, tmp_path / "blind", keep_vision=False, **HOW)
    assert not (tmp_path / "blind" / VISION_FILE).exists()
    for asked in ({"keep_vision": True}, {"vision_bits": 4}):
        with pytest.raises(OptionError, match="no part that sees"):
            convert(tmp_path / "blind", tmp_path / "out", **asked, **HOW)
    with pytest.raises(OptionError, match="left out or unpacked"):
        convert(source, tmp_path / "out", vision_bits=4, keep_vision=False)
