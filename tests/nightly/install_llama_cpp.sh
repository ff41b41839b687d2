#!/usr/bin/env bash
# Install llama.cpp for CPUs and its converter into a virtual environment of its own: install_llama_cpp.sh FOLDER.
# 1.5 GB; needs Python 3.11. llama.cpp comes compiled in xllamacpp, the converter in the sources of llama-cpp-python.
set -euo pipefail
folder=$1
python3.11 -m venv "$folder"
pip() { "$folder/bin/pip" --disable-pip-version-check "$@"; }
pip install -q xllamacpp==2026.10.11549 torch==2.13.0 transformers==4.57.6 'sentencepiece<0.3' 'protobuf<5'
pip download -q --no-deps --no-binary=llama-cpp-python -d "$folder/sources" llama-cpp-python==0.3.36
tar -xzf "$folder"/sources/llama_cpp_python-*.tar.gz -C "$folder" --strip-components=2 --wildcards \
  '*/vendor/llama.cpp/convert_hf_to_gguf.py' '*/vendor/llama.cpp/conversion' '*/vendor/llama.cpp/gguf-py'
