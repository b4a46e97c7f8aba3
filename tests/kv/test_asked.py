"""What a spec asks for and a model can't give: refused where it was asked for, said where it has no effect."""

import pytest

from tests.kv.models import tiny_llama
from tokamac.engine import KVSpec, OptionError
from tokamac.engine.kv import plan_caches

LLAMA = {"model_type": "llama", "max_position_embeddings": 512}


def notes(spec: KVSpec) -> str:
    return " ".join(plan_caches(tiny_llama(), LLAMA, spec).notes)


@pytest.mark.parametrize(("head_dim", "best"), [(32, 32), (64, 64), (96, 32), (192, 64)])
def test_a_group_size_that_was_asked_for_is_refused_with_what_can_be_had(head_dim: int, best: int) -> None:
    with pytest.raises(OptionError, match="this model can't use KV groups of 128") as caught:
        plan_caches(tiny_llama(head_dim=head_dim), LLAMA, KVSpec(8, 16, group_size=128))
    assert f"Use groups of {best} (--kv-group-size {best})" in caught.value.hint
    plan = plan_caches(tiny_llama(head_dim=head_dim), LLAMA, KVSpec(8, 16, group_size=best))
    assert plan.layers[0].group_size == best
    assert plan.notes == ()


def test_a_group_size_that_divides_is_honoured() -> None:
    assert plan_caches(tiny_llama(head_dim=128), LLAMA, KVSpec(8, 8, group_size=128)).layers[0].group_size == 128


def test_the_default_group_size_gives_way_with_a_note() -> None:
    assert "groups of 32, not 64" in notes(KVSpec(8, 8))


def test_a_group_size_of_nothing_that_is_packed_is_no_error() -> None:
    assert notes(KVSpec(group_size=128)) == ""


def test_pinned_tokens_without_a_window_are_told_of() -> None:
    assert "keep 5000 has no effect: without a window nothing rolls out" in notes(KVSpec(keep=5000))
    assert "keep system has no effect" in notes(KVSpec(keep="system"))
    for spec in (KVSpec(), KVSpec(keep=5000, on_full="roll"), KVSpec(window=64, keep=8)):
        assert notes(spec) == ""


def test_a_window_longer_than_the_context_is_told_of() -> None:
    assert "the context holds 512 tokens, not 100,000" in notes(KVSpec(window=100_000, on_full="stop"))
    assert "100,000 tokens is more than the 512 that the model was made for" in notes(KVSpec(window=100_000))
    for spec in (KVSpec(window=512), KVSpec(window=512, on_full="stop"), KVSpec(window=64, on_full="error")):
        assert notes(spec) == ""
