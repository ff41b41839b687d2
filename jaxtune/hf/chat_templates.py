"""Chat templates by name, for tokenizers of base models, which have none."""

from pathlib import Path

from jaxtune.errors import UserError

# {% generation %} marks the assistant's text, which is trained; transformers uses the same mark.
_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# name: (template, the special tokens that it emits)
NAMED = {
    "chatml": (_CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": (_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
}


def find_template(wanted: str, vocabulary: dict[str, int]) -> str:
    """The Jinja source of a template, by its name or from a file.

    Raises:
        UserError: `wanted` is neither a name nor a readable file, or the vocabulary lacks its special tokens.
    """
    if wanted in NAMED:
        template, tokens = NAMED[wanted]
        if missing := [token for token in tokens if token not in vocabulary]:
            listed = ",".join(missing)
            raise UserError(
                f"data.chat_template={wanted!r} writes {' and '.join(missing)}, which this tokenizer does not have; "
                f"--config.data.special_tokens='{listed}' adds them"
            )
        return template
    try:
        return Path(wanted).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.chat_template={wanted!r} is neither one of {', '.join(NAMED)} nor a file that can be read: {error}"
        ) from error
