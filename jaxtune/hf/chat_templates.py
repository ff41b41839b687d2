"""Chat templates by name, and the models that a template was published with.

`templates` holds one Jinja file for each name. Most are written here, for base models, whose tokenizers have no
template: the format that a family was published with, and `{% generation %}` marks around the assistant's text, which
is trained on (transformers uses the same mark). `templates/published` holds templates of models byte for byte.
"""

import hashlib
from functools import cache
from pathlib import Path

from jaxtune.errors import UserError
from jaxtune.json_file import read_json

_FOLDER = Path(__file__).parent / "templates"
_PUBLISHED = _FOLDER / "published"
_CHATML = ("<|im_start|>", "<|im_end|>")
_GLM4 = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
# name: the special tokens that the template emits, apart from bos_token and eos_token
NAMED = {
    "chatml": _CHATML,
    "qwen3": _CHATML,
    "qwen3_nothinking": _CHATML,
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma3": ("<start_of_turn>", "<end_of_turn>"),
    "mistral_v3": ("[INST]", "[/INST]"),
    "mistral_v7": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    "phi4": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "deepseek": ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
    "gpt_oss": _HARMONY,
    "glm4": _GLM4,
    "ernie": ("<|begin_of_sentence|>", "<|end_of_sentence|>"),
    "kimi_k2": ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    "zephyr": (),
    "alpaca": (),
    "vicuna": (),
    **dict.fromkeys(("qwen3_2507", "qwen3_5", "qwen3_5_nothinking", "qwen3_6", "qwen3_8"), _CHATML),
    "gemma4": ("<|turn>", "<turn|>"),
    **dict.fromkeys(("glm4_moe", "glm4_7_flash"), _GLM4),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super", "lfm2", "lfm2_5"), _CHATML),
    "minimax_m2": ("]~!b[", "]~b]", "[e~["),
    **dict.fromkeys(("granite4", "granite4_1"), ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")),
    "ministral3_reasoning": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    "north_mini_code": ("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    "seed_oss": ("<seed:bos>", "<seed:eos>"),
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


def describe_template(template: str, wanted: str | None) -> str:
    """Return words that say which chat template is used, why, and which model was published with it, if that is known.

    Args:
        template: the Jinja source.
        wanted: chat.template; None: it is unset, so `template` is the tokenizer's own.
    """
    if wanted is None:
        which = "the tokenizer's own, because chat.template is unset"
    else:
        which = f"{'Jinja text' if wanted == template else wanted}, because chat.template says so"
    model = _models().get(hashlib.sha256(template.encode()).hexdigest())
    published = f"; published with {model}" if model else ""
    return f"{which}{published}"


@cache
def _models() -> dict[str, str]:
    """Words about the models that templates were published with, by the SHA-256 of the template."""
    return read_json(_PUBLISHED / "models.json")


def _read_template(name: str) -> str:
    if name == "qwen3_nothinking":
        return "{%- set enable_thinking = false %}\n" + _read_template("qwen3")
    published = _PUBLISHED / f"{name}.jinja"
    return (published if published.is_file() else _FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
