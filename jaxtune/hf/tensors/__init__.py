"""Tensors in safetensors files: found (`tensor_sources`, `mxfp4_tensors`), read into shards, and written."""
