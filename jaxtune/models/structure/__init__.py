"""The structure of a model: frozen records that a family reads from config.json; no arrays."""
