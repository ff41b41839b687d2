"""Documents to batches: mixing, packing plan, rows, streams and the loader of each device."""
