"""Chat templates by name, for the tokenizers of base models, which have no template.

`templates` holds one Jinja file for each: the format that a model family was published with. `{% generation %}` marks
the assistant's text, which is trained on; transformers uses the same mark.
"""

from pathlib import Path

from jaxtune.errors import UserError

_FOLDER = Path(__file__).parent / "templates"
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
# name: the special tokens that the template emits, apart from bos_token and eos_token
NAMED = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "qwen3_nothinking": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "mistral_v3": ("[INST]", "[/INST]"),
    "mistral_v7": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "deepseek": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    "gpt_oss": _HARMONY,
    "glm4": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    "ernie": ("<|begin_of_sentence|>", "<|end_of_sentence|>"),
    "zephyr": (),
    "alpaca": (),
    "vicuna": (),
}


def find_template(wanted: str, vocabulary: dict[str, int]) -> str:
    """Return the Jinja source of a template, given its name, a file, or the source itself.

    Raises:
        UserError: `wanted` is neither a name, a readable file nor Jinja, or the vocabulary lacks its special tokens.
    """
    if any(mark in wanted for mark in ("{{", "{%")):
        return wanted
    if wanted in NAMED:
        if missing := [token for token in NAMED[wanted] if token not in vocabulary]:
            listed = ",".join(missing)
            raise UserError(
                f"chat.template={wanted!r} writes {' and '.join(missing)}, which this tokenizer does not have; "
                f"--config.data.special_tokens='{listed}' adds them"
            )
        return _read_template(wanted)
    try:
        return Path(wanted).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"chat.template={wanted!r} is neither one of {', '.join(NAMED)} nor a file that can be read: {error}"
        ) from error


def _read_template(name: str) -> str:
    if name == "qwen3_nothinking":
        return "{%- set enable_thinking = false %}\n" + _read_template("qwen3")
    return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
