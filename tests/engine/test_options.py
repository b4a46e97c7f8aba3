"""What callers may pass: arguments of the engine's methods, and the values of options."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import mlx.core as mx
import numpy as np
import pytest

import tokamac.engine
import tokamac.quant
from tests.engine.inside import runner_of
from tokamac.engine import (
    ContextError,
    Engine,
    EngineClosedError,
    KVSpec,
    MemoryLimitError,
    Message,
    ModelNotFoundError,
    OptionError,
    PromptCacheSpec,
    Sampling,
)
from tokamac.engine.errors import TokamacError
from tokamac.engine.events import given_ids, given_prompt
from tokamac.engine.lab.scoring import _rows_at_once, check_scored, logprobs
from tokamac.engine.options import given_count
from tokamac.quant.options import Options

# What callers may give an engine, and what they are told where they may not. The same for each of its methods.

GREEDY = Sampling(temperature=0, max_tokens=2)

TAKERS: dict[str, Callable[[Engine, object], object]] = {
    "generate": lambda engine, prompt: list(engine.generate(prompt, GREEDY)),  # type: ignore[arg-type]
    "warm": lambda engine, prompt: list(engine.warm(prompt)),  # type: ignore[arg-type]
    "price": lambda engine, prompt: engine.price(prompt),  # type: ignore[arg-type]
    "logprobs": lambda engine, prompt: engine.logprobs(prompt),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine.load(tiny) as loaded:
        yield loaded


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize(
    "ids",
    [[10, 11], (10, 11), range(10, 12), np.array([10, 11]), [np.int32(10), 11], mx.array([10, 11])],
    ids=["list", "tuple", "range", "numpy", "numpy's ints", "mlx"],
)
def test_ids_of_any_kind_are_ids(engine: Engine, take: Callable[[Engine, object], object], ids: object) -> None:
    assert take(engine, ids) is not None


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (b"Hello", "a text is not"), ([], "no token"), (None, "NoneType"), (5, "int is not"),
        (np.array(5), "single number"), ({"role": "user"}, "dict is not"), (Message("user", "x"), "Message is not"),
        ([True, 5], "True is no token id"), ([1.5], "1.5 is no token id"), (["a"], "'a' is no token id"),
        ([[1, 2]], "is no token id"), (np.array([1.0]), "is no token id"), (np.array([[1, 2]]), "is no token id"),
        (mx.array([True]), "is no token id"), ([-1], "not in the vocabulary"), ([10_000], "not in the vocabulary"),
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_prompt_is_said(
    engine: Engine, take: Callable[[Engine, object], object], prompt: object, said: str
) -> None:
    with pytest.raises(OptionError, match=said) as caught:
        take(engine, prompt)
    assert caught.value.hint


@pytest.mark.parametrize("take", [TAKERS["generate"], TAKERS["warm"], TAKERS["price"]])
def test_the_openai_form_is_named_and_so_is_ours(engine: Engine, take: Callable[[Engine, object], object]) -> None:
    for prompt in ([{"role": "user", "content": "x"}], [Message("user", "x"), {"role": "user"}]):
        with pytest.raises(OptionError, match="dict") as caught:
            take(engine, prompt)
        assert "Message(role, content)" in caught.value.hint
    with pytest.raises(OptionError, match="int is among the messages"):
        take(engine, [Message("user", "x"), 5])


@pytest.mark.parametrize("take", TAKERS.values(), ids=TAKERS)
def test_a_text_is_one_message_of_the_user_and_no_ids(
    engine: Engine, take: Callable[[Engine, object], object], request: pytest.FixtureRequest
) -> None:
    if request.node.callspec.id in ("generate", "warm", "price"):
        assert take(engine, "Hello") is not None
    else:
        with pytest.raises(OptionError, match="a text is not"):
            take(engine, "Hello")


def test_bytes_are_told_where_a_text_belongs() -> None:
    with pytest.raises(OptionError) as caught:
        given_prompt(b"Hello")
    for way in ("chat().send(text)", 'Message("user", text)', "tokenizer.encode(text)"):
        assert way in caught.value.hint
    with pytest.raises(OptionError, match="messages are not token ids"):
        given_ids([Message("user", "x")], "scoring")


def test_ids_become_pythons_own() -> None:
    assert [type(token) for token in given_ids(np.array([1, 2]), "scoring")] == [int, int]
    assert given_prompt(token for token in (1, 2)) == [1, 2]


@pytest.mark.parametrize("chunk", [0, -1, 2.5, "2", True])
def test_a_chunk_is_a_number_of_tokens(engine: Engine, chunk: object) -> None:
    with pytest.raises(OptionError, match="chunk is"):
        engine.logprobs([10, 11], chunk)  # type: ignore[arg-type]


def test_limits_and_predictions_are_of_numbers_of_tokens(engine: Engine) -> None:
    for context in (-10_000, 1.5, "x", None):
        with pytest.raises(OptionError, match="context is"):
            engine.limits(context)  # type: ignore[arg-type]
    for given in ((0,), (1.5,), ("x",), (10, 0), (10, 1.5), (10, "x")):
        with pytest.raises(OptionError):
            engine.predict(*given)  # type: ignore[arg-type]
    for cached in (-1, 10, 1.5, None):
        with pytest.raises(OptionError):
            engine.predict(10, cached=cached)  # type: ignore[arg-type]
    assert engine.predict(np.int64(10), 20, cached=9).cached == 9  # type: ignore[arg-type]
    assert given_count(np.int64(7), "a context", least=0) == 7


def test_a_comparison_is_of_ids(engine: Engine) -> None:
    for tokens in ("abc", [], [1.5], [Message("user", "x")]):
        with pytest.raises(OptionError):
            list(engine.compare_kv(tokens, [(8, 8)], depths=(4,)))  # type: ignore[arg-type]


def test_sampling_is_a_sampling(engine: Engine) -> None:
    with pytest.raises(OptionError, match="sampling is a dict"):
        list(engine.generate([10], {"temperature": 0}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields", [(None, "x"), (["user"], "x"), ("user", None), ("user", b"x"), ("assistant", "x", None)]
)
def test_a_message_has_a_role_and_texts(fields: tuple[object, ...]) -> None:
    with pytest.raises(OptionError):
        Message(*fields)  # type: ignore[arg-type]


def test_what_is_scored_must_fit_the_context(tiny: Path, engine: Engine) -> None:
    ids = [10 + at % 200 for at in range(600)]
    with pytest.raises(ContextError, match=r"513 tokens.*context is 512"):
        engine.logprobs(ids[:513])
    assert engine.logprobs(ids[:512]).shape == (512, 272)
    with Engine.load(tiny, kv=KVSpec(window=32, keep=4, on_full="stop"), prompt_cache=None) as stops:
        with pytest.raises(ContextError, match=r"40 tokens.*window holds 32"):
            stops.logprobs(ids[:40])
        assert stops.logprobs(ids[:32]).shape == (32, 272)
    with Engine.load(tiny, kv=KVSpec(window=32, keep=4), prompt_cache=None) as rolls:
        assert rolls.logprobs(ids).shape == (600, 272)


def test_what_is_scored_must_fit_the_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = runner_of(engine)
    least = core.runtime.shape.weights
    monkeypatch.setattr("tokamac.engine.perf.memory.array_budget", lambda: least + 10_000_000)
    assert engine.logprobs([10, 11]).shape == (2, 272)
    monkeypatch.setattr(type(core.runtime.kv), "rolls", property(lambda _: True))  # no context is in the way
    with pytest.raises(MemoryLimitError, match=r"5,000 tokens need .*\(10\.9 MB .* 272 numbers"):
        check_scored(core.runtime, core.store, 5_000, 2_048, 272)


@pytest.mark.parametrize("chunk", [None, 50])
def test_the_rows_that_are_counted_are_there(engine: Engine, chunk: int | None, settled_memory: None) -> None:
    """The forecast counts the least: what is really taken is no less."""
    ids = [10 + at % 200 for at in range(500)]

    def measured() -> int:
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        logprobs(runner_of(engine), ids, chunk)
        return mx.get_peak_memory() - before

    assert 4 * 272 * _rows_at_once(500, chunk or 500) <= engine.between(measured)


@pytest.mark.parametrize("model", [None, 5, b"guide", ["guide"]])
def test_a_model_is_named_by_a_text_or_a_path(model: object) -> None:
    with pytest.raises(OptionError, match="names no model"):
        Engine.load(model)  # type: ignore[arg-type]


def test_what_is_loaded_with_is_of_its_kind() -> None:
    with pytest.raises(OptionError, match="kv is a NoneType"):
        Engine.load("guide", kv=None)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="prompt_cache is a bool"):
        Engine.load("guide", prompt_cache=False)  # type: ignore[arg-type]


def test_the_embedded_models_name_has_no_slash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("guide/", Path("guide")):
        with pytest.raises(ModelNotFoundError, match="no folder guide") as caught:
            Engine.load(name)
        assert "embedded model is just guide" in caught.value.hint
    with pytest.raises(ModelNotFoundError) as caught:
        Engine.load("guides/")
    assert "embedded" not in caught.value.hint


def test_an_engine_says_what_it_is_and_a_closed_one_is_not_entered(tiny: Path) -> None:
    engine = Engine.load(tiny, prompt_cache=None)
    assert repr(engine) == f"<Engine {str(tiny)!r} on {engine.spec.device}>"
    engine.close()
    assert repr(engine).endswith(", closed>")
    with pytest.raises(EngineClosedError), engine:
        pass
    for ask in (lambda: engine.limits(1), lambda: engine.predict(5), engine.memory):
        with pytest.raises(EngineClosedError):
            ask()


def test_a_negative_id_has_no_text(engine: Engine) -> None:
    with pytest.raises(OptionError, match="negative"):
        engine.tokenizer.decode([-1])


# What callers may write in options: numbers of any library, texts in any list, and an error that says what is
# wrong.

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
