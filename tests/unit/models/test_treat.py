"""Options that select layers by name apply to them, and unlike layers form stacks of their own."""

import dataclasses

import pytest
from tiny import spec

from jaxtune.errors import UserError
from jaxtune.models.parameters import declare
from jaxtune.models.structure.stack_spec import stacks
from jaxtune.models.treatment import freeze, linears, select_linears, treat_linears
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions


def test_what_is_skipped_or_excluded_falls_into_stacks_of_its_own():
    whole = spec(layers=6)
    options = QuantOptions(format="nf4", skip_first_layers=1, skip_last_layers=2, exclude=r"layers\.2\..*down_proj")
    chosen = select_linears(whole, options, "quant")
    assert len(chosen) == 3 * 7 - 1 and chosen < linears(whole).keys()
    marked = treat_linears(whole, chosen, stored="a format")
    assert [(stack.first, stack.repeats) for stack in stacks(marked.layers)] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]
    stored = [layer.treatment("mlp.down.weight").stored for layer in marked.layers]
    assert stored == [None, "a format", None, "a format", None, None]
    with pytest.raises(UserError, match="quant.exclude='nothing' matches none"):
        select_linears(whole, QuantOptions(format="nf4", exclude="nothing"), "quant")


@pytest.mark.parametrize("options", [QuantOptions(format="nf4"), PrecisionOptions("fp8_hybrid")])
@pytest.mark.parametrize("name", ["lm_head", "lm_head.weight", "embed_tokens", "layers.5.input_layernorm"])
def test_excluding_what_is_not_selectable_says_that_it_needs_none(options, name):
    section = "quant" if isinstance(options, QuantOptions) else "precision"
    message = rf"{section}.exclude='{name}' matches none.*{section} leaves \S*{name} alone, so it needs no"
    with pytest.raises(UserError, match=message):
        select_linears(spec(layers=6), dataclasses.replace(options, exclude=name), section)
    for near in ("nothing", "q_proj.weight"):
        with pytest.raises(UserError, match="matches none") as error:
            select_linears(spec(layers=6), dataclasses.replace(options, exclude=near), section)
        assert "alone" not in str(error.value)


def test_a_frozen_layer_is_not_trained():
    whole = spec()
    frozen = freeze(whole, r"embed_tokens|layers\.0\.")
    _, declared = declare(frozen)
    assert not declared["embed.weight"].trained
    assert {p.layers: p.trained for p in declared.values() if p.local == "mlp.up.weight"} == {
        (0,): False,
        (1, 2, 3): True,
    }
    with pytest.raises(UserError, match=r"train\.freeze.*matches none"):
        freeze(whole, "no_such_layer")
    with pytest.raises(UserError, match="nothing is left"):
        freeze(whole, "model")
