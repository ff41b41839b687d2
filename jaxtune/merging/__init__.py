"""Merging of models, or of adapters, that come from the same base, tensor by tensor and without a device."""
