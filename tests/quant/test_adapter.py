"""An adapter that a conversion adds to the weights is as if it stood beside them; and models that are converted unchecked."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.adapter_files import write_fused, write_peft
from tests.engine.seeded import write_model
from tests.quant.converting import arrays_of
from tokamac.engine import Engine
from tokamac.engine.errors import ModelUnsupportedError
from tokamac.quant import convert
from tokamac.quant.conversion import conversion_key
from tokamac.quant.options import Options
from tokamac.quant.source import fresh, open_adapter, open_source

IDS = [5, 60, 7, 120, 9, 33, 250, 8, 41, 77]


def logprobs(folder: Path, adapter: Path | None = None) -> np.ndarray:
    with Engine.load(folder, prompt_cache=None, adapter=adapter) as engine:
        return np.array(engine.logprobs(IDS))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_unpacked_it_computes_what_the_adapter_beside_the_weights_computes(
    tmp_path: Path, bits: int | None, dora: bool
) -> None:
    source = write_model(tmp_path / "source", bits=bits)
    adapter = write_peft(tmp_path / "adapter", write_model(tmp_path / "plain"), dora=dora)
    convert(source, tmp_path / "out", dequantize=True, dtype="float32", adapter=adapter, verify=False)
    beside = logprobs(source, adapter)
    assert np.abs(beside - logprobs(source)).max() > 0.1
    assert np.allclose(logprobs(tmp_path / "out"), beside, atol=3e-4)


def test_packed_it_is_what_the_changed_weights_are_packed_to(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "plain")
    adapter = write_peft(tmp_path / "adapter", plain)
    by_hand = write_fused(tmp_path / "by_hand", plain, adapter)
    how = {"bits": 4, "group_size": 32, "method": "round", "verify": False}
    convert(plain, tmp_path / "ours", adapter=adapter, **how)
    convert(by_hand, tmp_path / "theirs", **how)
    ours, theirs = arrays_of(tmp_path / "ours"), arrays_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, words in ours.items():
        if words.dtype != mx.uint32:
            assert np.allclose(np.array(words), np.array(theirs[name]), atol=1e-5), name


def test_what_was_packed_and_is_not_changed_is_taken_over_and_the_rest_packed_again(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", bits=4)
    adapter = write_peft(tmp_path / "adapter", write_model(tmp_path / "plain"))
    convert(source, tmp_path / "out", bits=4, group_size=32, method="round", adapter=adapter, verify=False)
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    again = {row["name"] for row in record["tensors"] if row["packing"] and not row["taken_over"]}
    assert again == {
        f"model.layers.{layer}.{name}.weight"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }


def test_it_is_compared_with_its_source_with_the_adapter_and_says_what_was_added(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    adapter = write_peft(tmp_path / "letters", source)
    report = convert(source, tmp_path / "out", bits=8, group_size=32, adapter=adapter)
    assert report.quality is not None
    assert report.quality.quality is not None
    assert report.quality.quality.kl < 0.01
    assert any("adapter letters: 6 matrices of rank 4" in note for note in report.notes)
    text = (tmp_path / "out" / "conversion.json").read_text()
    assert json.loads(text)["options"]["adapter"] == {"name": "letters", "digest": open_adapter(adapter).digest}
    assert str(tmp_path) not in text
    assert "`letters`" in (tmp_path / "out" / "README.md").read_text()


def test_an_unfinished_conversion_with_another_adapter_is_another(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    one, other = (open_adapter(write_peft(tmp_path / f"{seed}", source, seed=seed)) for seed in (1, 2))
    keys = {conversion_key(source, Options(), adapter) for adapter in (one, other, None)}
    assert len(keys) == 3


def test_weights_read_anew_have_the_adapter_too(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    opened = open_source(source, adapter=open_adapter(write_peft(tmp_path / "adapter", source)))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert mx.array_equal(fresh(opened)[name], opened.weights[name])
    assert not mx.array_equal(fresh(opened)[name], fresh(open_source(source))[name])


def test_a_doubtful_model_is_converted_unchecked_and_the_notes_say_what_is_doubted(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", logits_scaling=2.0)
    with pytest.raises(ModelUnsupportedError, match="logits_scaling") as caught:
        convert(source, tmp_path / "out")
    assert "--unchecked" in caught.value.hint
    report = convert(source, tmp_path / "out", bits=8, group_size=32, unchecked=True)
    assert any(note.startswith("unchecked: config.json sets logits_scaling") for note in report.notes)
    assert report.quality is not None
    assert report.quality.quality is not None
    with pytest.raises(ModelUnsupportedError, match="logits_scaling"):
        Engine.load(tmp_path / "out", prompt_cache=None)
