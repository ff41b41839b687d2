"""Speed and memory of tokenising plain text: tokens a second and core, and peak RSS for two sizes of text.

    python benchmarks/tokenising.py [--megabytes=64]

The tokenizer is a byte-level BPE of 32 768 tokens, with the pattern of GPT-2, trained on the standard library of
Python; the text is the same library, cut and numbered, as JSON lines. Each run is a process of its own, with one
thread. Tokens a second are per CPU second, so other load on the machine does not count.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
import time
from datetime import date
from pathlib import Path

VOCABULARY = 2**15
RESULTS = Path(__file__).parent / "results" / "tokenising.json"


def main() -> None:
    """Run all sizes, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="of the larger text; the other has a quarter")
    parser.add_argument("--run", nargs=2, metavar=("FOLDER", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run(Path(options.run[0]), options.run[1])))
        return
    rows = []
    columns = ("text MB", "CPU s", "clock s", "tokens", "tokens/s", "RSS at start MB", "peak MB")
    print("".join(f"{column:>16}" for column in columns))
    with tempfile.TemporaryDirectory() as folder:
        texts = library()
        train_tokenizer(texts, Path(folder) / "tokenizer")
        for megabytes in (options.megabytes // 4, options.megabytes):
            write(texts, Path(folder) / f"{megabytes}.jsonl", megabytes * 10**6)
        for megabytes in (options.megabytes // 4, options.megabytes):
            command = [sys.executable, __file__, "--run", folder, str(megabytes)]
            environment = os.environ | {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            measured = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
            rows.append({"megabytes": megabytes, **measured})
            rate = measured["tokens"] / measured["cpu_seconds"]
            rows[-1]["tokens_per_second"] = round(rate)
            line = f"{megabytes:>16}{measured['cpu_seconds']:>16.1f}{measured['seconds']:>16.1f}"
            line += f"{measured['tokens']:>16,}{rate:>16,.0f}{measured['rss_at_start_mb']:>16}{measured['rss_mb']:>16}"
            print(line, flush=True)
    result = {"date": str(date.today()), "cpu": cpu(), "cores": os.cpu_count(), "vocabulary": VOCABULARY, "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


def cpu() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.processor())


def library() -> list[str]:
    """Return the modules of Python's standard library, as text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    modules = [file for file in files if "site-packages" not in file.parts]
    texts = [file.read_text(encoding="utf-8", errors="ignore") for file in modules]
    return [text for text in texts if len(text) > 1000]


def train_tokenizer(texts: list[str], folder: Path) -> None:
    """Train a byte-level BPE tokenizer on texts, and save it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(folder)


def write(texts: list[str], file: Path, size: int) -> None:
    """Write the texts as JSON lines of up to 4000 characters until the file has `size` bytes. All lines differ."""
    number = 0
    with file.open("w", encoding="utf-8") as lines:
        while lines.tell() < size:
            for text in texts:
                for start in range(0, len(text), 4000):
                    number += 1
                    lines.write(json.dumps({"text": f"# {number}\n{text[start : start + 4000]}"}) + "\n")
                if lines.tell() >= size:
                    break


def peak_mb() -> int:
    """Return the peak RSS of this process, only on Linux (ru_maxrss starts at the parent process's value)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1000


def run(folder: Path, name: str) -> dict:
    """Tokenise a file into a new cache; return seconds, tokens, and this process's peak memory before and after."""
    import transformers

    from jaxtune.config.schema import Dataset
    from jaxtune.data.cache.documents import tokenize

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    at_start = peak_mb()
    entry = Dataset(path=str(folder / f"{name}.jsonl"))
    start, cpu_start = time.perf_counter(), time.process_time()
    documents = tokenize((entry,), tokenizer, folder / "cache")
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = peak_mb()
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(cpu_seconds, 2),
        "tokens": int(documents.lengths.sum()),
        "rss_at_start_mb": at_start,
        "rss_mb": peak,
    }


if __name__ == "__main__":
    main()
