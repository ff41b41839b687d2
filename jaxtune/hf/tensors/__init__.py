"""Tensors in safetensors files: where each is (`tensor_sources`, `mxfp4_tensors`), read into shards, and written."""
