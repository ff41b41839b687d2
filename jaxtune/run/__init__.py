"""A run around its steps: `inputs`, `start`, `loop`, `tasks`, `watch`, `resume`, `mirror_sync`, `results`."""
