"""What is chosen by name is marked in the layers, and unlike layers are stacks of their own."""

import pytest
from tiny import spec

from jaxtune.config.schema import Quant
from jaxtune.errors import UserError
from jaxtune.models.families import linears
from jaxtune.models.mark import mark, selected
from jaxtune.models.spec import stacks


def test_what_is_skipped_or_excluded_falls_into_stacks_of_its_own():
    whole = spec(layers=6)
    options = Quant(format="nf4", skip_first_layers=1, skip_last_layers=2, exclude=r"layers\.2\..*down_proj")
    chosen = selected(whole, options, "quant")
    assert len(chosen) == 3 * 7 - 1 and chosen < linears(whole).keys()
    marked = mark(whole, chosen, "quantized")
    assert [(stack.first, stack.repeats) for stack in stacks(marked.layers)] == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2)]
    assert "mlp.down.weight" in marked.layers[1].quantized - marked.layers[2].quantized
    with pytest.raises(UserError, match="quant.exclude='nothing' matches none"):
        selected(whole, Quant(format="nf4", exclude="nothing"), "quant")
