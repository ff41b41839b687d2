"""Which layers are scanned together."""

from hypothesis import given
from hypothesis import strategies as st
from tiny import layer

from jaxtune.models.structure.stack_spec import stacks

A, B = layer(), layer(window=8)


def test_equal_layers_are_one_stack():
    (stack,) = stacks((A,) * 32)
    assert (stack.first, stack.period, stack.repeats) == (0, (A,), 32)


def test_unlike_halves_are_two_stacks():
    assert [(s.first, s.period, s.repeats) for s in stacks((B, B, A, A))] == [(0, (B,), 2), (2, (A,), 2)]


def test_a_repeating_pattern_scans_its_period():
    (stack,) = stacks((B, B, B, A) * 6)
    assert (stack.period, stack.repeats) == ((B, B, B, A), 6)
    assert stack.layer_numbers(3) == [3, 7, 11, 15, 19, 23]


def test_the_longest_stack_is_the_pipeline_and_leaves_over_what_stages_do_not_divide():
    arranged = stacks((B, *[A] * 11, B), stages=2, chunks=2)
    assert [(s.first, s.repeats, s.stages) for s in arranged] == [(0, 1, 1), (1, 8, 2), (9, 3, 1), (12, 1, 1)]


def test_a_stage_has_every_second_part_of_the_layers():
    (stack,) = stacks((B, A) * 8, stages=2, chunks=2)
    of_a_stage = [0, 2, 8, 10]
    assert stack.layer_numbers(0) == [*of_a_stage, *(layer + 4 for layer in of_a_stage)]


def test_fewer_layers_than_parts_are_no_pipeline():
    assert stacks((A,) * 3, stages=2, chunks=2) == stacks((A,) * 3)


@given(
    st.lists(st.sampled_from([A, B, layer(window=4)]), min_size=1, max_size=24),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1)]),
)
def test_every_layer_is_in_exactly_one_place(layers, parts):
    by_number = {}
    for stack in stacks(tuple(layers), *parts):
        for position, one in enumerate(stack.period):
            for number in stack.layer_numbers(position):
                assert number not in by_number
                by_number[number] = one
    assert [by_number[number] for number in range(len(layers))] == layers
