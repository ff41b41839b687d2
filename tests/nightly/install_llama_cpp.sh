#!/usr/bin/env bash
# Install llama.cpp for CPUs and its converter into a virtual environment of its own: install_llama_cpp.sh FOLDER.
# 1.5 GB; needs Python 3.11. llama.cpp comes compiled in xllamacpp, the converter in the sources of llama-cpp-python, and
# with it the vocabulary of GPT-2, of which FOLDER/tokenizer is made.
set -euo pipefail
folder=$1
python3.11 -m venv "$folder"
pip() { "$folder/bin/pip" --disable-pip-version-check "$@"; }
pip install -q xllamacpp==2026.10.11549 torch==2.13.0 transformers==4.57.6 'sentencepiece<0.3' 'protobuf<5'
pip download -q --no-deps --no-binary=llama-cpp-python -d "$folder/sources" llama-cpp-python==0.3.36
tar -xzf "$folder"/sources/llama_cpp_python-*.tar.gz -C "$folder" --strip-components=3 --wildcards \
  '*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion' '*/vendor/llama.cpp/gguf-py' \
  '*/vendor/llama.cpp/models/ggml-vocab-gpt-2.gguf'
cd "$folder"
PYTHONPATH=gguf-py bin/python - <<'EOF'
import json
from pathlib import Path

from gguf import GGUFReader
from transformers import GPT2TokenizerFast

fields = GGUFReader("models/ggml-vocab-gpt-2.gguf").fields
tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
Path("vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
Path("merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
GPT2TokenizerFast("vocab.json", "merges.txt").save_pretrained("tokenizer")
EOF
