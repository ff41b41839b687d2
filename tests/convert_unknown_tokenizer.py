"""llama.cpp's converter without its check that a tokenizer is a published one: convert_unknown_tokenizer.py FOLDER ...

FOLDER has the converter; the other arguments are its own. The file has the right tokens, but texts may be divided into
them in another way, so only prompts of token ids mean the same.
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    sys.path[:0] = [str(folder), str(folder / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
    runpy.run_path(str(folder / "convert_hf_to_gguf.py"), run_name="__main__")
