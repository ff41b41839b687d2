"""Tests of all families have a row for each tiny config, or a reason why not."""

import pytest
from family_configs import FAMILIES
from nightly import test_meshes_of_families
from parity import test_families, test_lora_peft, test_packing
from tiny import model_type

from jaxtune.models import families

# Tests that are for every family, and the configs that they leave out.
TESTS = {
    test_families.test_logits_also_of_packed_documents: {},
    test_families.test_logits_loss_and_gradients: {},
    test_families.test_bfloat16_is_within_its_noise: {},
    test_families.test_export_gives_back_every_bit: {},
    test_families.test_greedy_tokens: test_families.GREEDY_LEFT_OUT,
    test_families.test_adapters_on_a_quantized_base: {},
    test_lora_peft.test_adapters_go_to_peft_and_back: {},
    test_packing.test_packed_equals_unpacked: {},
    test_meshes_of_families.test_four_devices_equal_one: {},
}


def rows_of(test) -> set[str]:
    """Return the configs that a test has rows of: by its own parameters, or by those of the fixture `case`."""
    rows = [row for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize" for row in mark.args[1]]
    names = [row if isinstance(row, str) else getattr(row, "values", row)[0] for row in rows]
    return {*names} if names else {*test_families.GROUPS}


@pytest.mark.parametrize(("test", "left_out"), TESTS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_every_config_is_in_every_test(test, left_out):
    assert rows_of(test) == FAMILIES.keys() - left_out.keys()
    assert all(left_out.values())


def test_every_family_has_a_config_that_no_test_leaves_out():
    left_out = {name for names in TESTS.values() for name in names}
    assert {model_type(name) for name in FAMILIES.keys() - left_out} == families.FAMILIES.keys()
