"""The position of a run, as checkpoints hold it."""

import json

from jaxtune.run.loop import Position


def test_a_position_is_what_it_was_saved_as():
    position = Position(step=7, feed={"row": 2**53 + 1}, tokens=2**40, bad_steps=1, put_off=("eval",))
    saved = json.loads(json.dumps({"data": "key"} | position.to_json()))
    assert Position.from_json(saved) == position


def test_checkpoints_from_before_feeds_are_understood():
    saved = {"step": 4, "row": 8, "tokens": 427, "bad_steps": 0, "evaluation_due": True}
    assert Position.from_json(saved) == Position(4, {"row": 8}, 427, 0, ("eval",))
