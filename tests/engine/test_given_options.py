"""What callers may write in options: numbers of any library, texts in any list, and an error that says what is wrong."""

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import tokamac.engine
import tokamac.quant
from tokamac.engine import Engine, KVSpec, OptionError, PromptCacheSpec, Sampling
from tokamac.engine.errors import TokamacError
from tokamac.quant.options import Options

INTEGERS = (
    (Sampling, ("max_tokens", "min_tokens", "seed", "top_k", "dry_allowed_length", "logprobs")),
    (KVSpec, ("key_bits", "value_bits", "group_size", "window")),
    (PromptCacheSpec, ("memory_bytes", "disk_bytes", "daily_write_bytes")),
    (Options, ("bits", "group_size", "embed_bits")),
)
FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "xtc_probability",
    "xtc_threshold", "dry_multiplier", "dry_base",
)  # fmt: skip
REALS = ((Sampling, FLOATS), (Options, ("target_bpw",)))


def named(kinds: tuple[tuple[Any, tuple[str, ...]], ...]) -> list[Any]:
    return [pytest.param(kind, name, id=f"{kind.__name__} {name}") for kind, names in kinds for name in names]


@pytest.mark.parametrize("value", [1.5, 4.0, "8", True, b"8", [8]], ids=repr)
@pytest.mark.parametrize(("kind", "name"), named(INTEGERS))
def test_what_is_no_integer_is_refused(kind: Any, name: str, value: object) -> None:
    with pytest.raises(OptionError, match="is not an integer") as caught:
        kind(**{name: value})
    assert repr(value) in caught.value.message


@pytest.mark.parametrize("value", ["x", True, [0.5], 1j], ids=repr)
@pytest.mark.parametrize(("kind", "name"), named(REALS))
def test_what_is_no_number_is_refused(kind: Any, name: str, value: object) -> None:
    with pytest.raises(OptionError, match="is not a number"):
        kind(**{name: value})


@pytest.mark.parametrize("name", FLOATS)
def test_not_a_number_is_out_of_range(name: str) -> None:
    given: dict[str, Any] = {name: float("nan")}
    with pytest.raises(OptionError, match="out of range"):
        Sampling(**given)


def test_numbers_of_other_libraries_become_plain_ones() -> None:
    made = Sampling(temperature=np.float32(0.5), top_p=Fraction(1, 2), seed=np.int64(3), max_tokens=np.uint8(9))  # type: ignore[arg-type]
    assert made == Sampling(temperature=0.5, top_p=0.5, seed=3, max_tokens=9)
    assert json.loads(json.dumps(asdict(made)))["max_tokens"] == 9
    kv = KVSpec(np.int32(8), np.int32(4), window=np.int16(64), keep=np.int8(2))  # type: ignore[arg-type]
    assert {type(value) for value in asdict(kv).values()} == {int, type(None)}
    assert type(Options(bits=np.int64(4)).bits) is int  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["sys", 4.5, None, True], ids=repr)
def test_keep_is_a_number_of_tokens_or_the_word_system(value: Any) -> None:
    with pytest.raises(OptionError, match="keep"):
        KVSpec(keep=value)


def test_stop_texts_come_in_any_list_or_as_one_text() -> None:
    assert Sampling(stop=["a", "b"]).stop == Sampling(stop=(each for each in "ab")).stop == ("a", "b")
    assert Sampling(stop="end").stop == ("end",)


def test_a_bias_is_a_mapping_or_pairs_and_ids_come_in_any_list_or_as_one() -> None:
    pairs = ((2, -1.0), (7, 3.5))
    assert Sampling(logit_bias={np.int64(7): np.float32(3.5), 2: -1}).logit_bias == pairs  # type: ignore[dict-item]
    assert Sampling(logit_bias=[(7, 3.5), (2, -1)]).logit_bias == Sampling(logit_bias=pairs).logit_bias == pairs
    assert Sampling(stop_token_ids=np.array([3, 4])).stop_token_ids == (3, 4)
    assert Sampling(stop_token_ids=3).stop_token_ids == (3,)
    assert Sampling(dry_sequence_breakers="|").dry_sequence_breakers == ("|",)
    assert hash(Sampling(logit_bias={1: 2})) == hash(Sampling(logit_bias=[(1, 2.0)]))


@pytest.mark.parametrize("value", [None, [1], 5, b"end", ["a", None]], ids=repr)
def test_what_is_no_stop_text_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match="is not a text"):
        Sampling(stop=value)


@pytest.mark.parametrize("given", [{"mode": None}, {"mode": []}, {"calibration": 5}, {"calibration": "other"}], ids=str)
def test_a_conversion_of_an_unknown_kind_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Options(**given)


def test_a_folder_may_be_a_text(tiny: Path, tmp_path: Path) -> None:
    spec = PromptCacheSpec(folder=str(tmp_path / "kept"))
    assert spec == PromptCacheSpec(folder=tmp_path / "kept")
    with Engine.load(tiny, prompt_cache=spec) as engine:
        assert engine.cache_trouble() is None
    with pytest.raises(OptionError, match="is not a path"):
        PromptCacheSpec(folder=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Sampling, PromptCacheSpec])
def test_the_signature_for_type_checkers_is_the_real_one(kind: Any) -> None:
    # The class body's own __init__ is for type checkers alone: the order and the defaults of both must be the same.
    import ast
    import inspect
    import textwrap

    body = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    (declared,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    real = list(inspect.signature(kind).parameters.values())
    assert [each.arg for each in declared.args.args[1:]] == [each.name for each in real]
    assert [ast.literal_eval(each) for each in declared.args.defaults] == [each.default for each in real]
    assert set(get_type_hints(kind)) == {each.name for each in real}


# Errors in a traceback ----------------------------------------------------------------------------------------------------

ENDS = "from tokamac.engine import Sampling; Sampling(temperature=11)"


def test_a_traceback_says_what_to_do_once() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=False)
    assert done.stderr.endswith("OptionError: temperature 11 is out of range\nUse 0 to 10.\n")
    assert done.stderr.count("Use 0 to 10.") == 1


def test_the_hint_is_no_part_of_the_message() -> None:
    error = TokamacError("it failed", "Do this.")
    assert (str(error), error.one_line()) == ("it failed", "it failed. Do this.")
    assert not hasattr(TokamacError("it failed"), "__notes__")


@pytest.mark.parametrize(
    "again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copied", "pickled"]
)
def test_a_copied_error_has_its_hint_once(again: Any) -> None:
    other = again(OptionError("it failed", "Do this."))
    assert (other.hint, other.__notes__) == ("Do this.", ["Do this."])


# Names --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", [tokamac.engine, tokamac.quant], ids=lambda package: package.__name__)
def test_every_public_name_is_listed_and_there(package: Any) -> None:
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name).__name__ == name for name in package.__all__ if name not in {"Action", "Event"})


def test_what_the_engine_returns_can_be_named(tiny: Path) -> None:
    from tokamac.engine import Limits, Memory, ModelSpec, Prediction, Tokenizer

    with Engine.load(tiny, prompt_cache=None) as engine:
        assert isinstance(engine.spec, ModelSpec)
        assert isinstance(engine.tokenizer, Tokenizer)
        assert isinstance(engine.limits(10), Limits)
        assert isinstance(engine.predict(10), Prediction)
        assert isinstance(engine.memory(), Memory)
