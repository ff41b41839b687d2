"""The work between steps: `loop`, its `tasks`, `watch` (metrics, stops), `resume`, and the checkpoint mirror."""
