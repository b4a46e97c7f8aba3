"""A conversion that gains nothing says so in its plan: of what is packed like that already, or is packed into less."""

from pathlib import Path

import pytest

from tests.quant.converting import packed_folder, run
from tests.quant.quant_models import make_source
from tokamac.quant.conversion import foreseen
from tokamac.quant.options import Options
from tokamac.quant.report import in_vain
from tokamac.quant.source import open_source

COPY = "the source is packed like this already: the result is a copy of it"


def said(folder: Path, **options) -> str:
    """What the plan says first; what it says of a gain is nothing."""
    plan = foreseen(open_source(folder), Options(**options))
    told = in_vain(plan)
    assert (told == plan.notes[0]) if told else ("already" not in " ".join(plan.notes))
    return told


def test_what_is_packed_like_that_already_is_copied(tmp_path):
    folder = packed_folder(tmp_path)
    assert said(folder) == COPY
    assert run(folder, tmp_path / "again", bits=4).notes[0] == COPY


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "group_size": 32}])
def test_more_bits_than_there_are_make_it_larger_and_no_better(tmp_path, options):
    folder = packed_folder(tmp_path)
    plan = foreseen(open_source(folder), Options(**options))
    before = 8 * plan.source_bytes / plan.parameters
    assert said(folder, **options) == (
        f"the source already has only {before:.2f} bits per weight: with {plan.bits_per_weight:.2f} it gets larger, not better"
    )
    assert plan.weight_bytes > plan.source_bytes


def test_what_gets_smaller_or_is_unpacked_is_not_in_vain(tmp_path):
    folder = packed_folder(tmp_path)
    assert said(folder, bits=3) == ""
    assert said(folder, dequantize=True) == ""  # larger, and that is what was asked for


def test_floats_are_not_packed_already(tmp_path):
    folder = make_source(tmp_path, "llama")
    assert said(folder, bits=8) == ""


def test_a_budget_whose_choices_are_not_made_yet_promises_no_copy(tmp_path):
    folder = packed_folder(tmp_path)
    assert said(folder) == COPY
    assert COPY not in foreseen(open_source(folder), Options(target_bpw=6.0)).notes
