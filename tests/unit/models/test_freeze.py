"""What train.freeze names is not trained."""

import pytest
from jaxtune.models.freeze import freeze
from tiny import spec

from jaxtune.errors import UserError
from jaxtune.models.parameters import declare


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
