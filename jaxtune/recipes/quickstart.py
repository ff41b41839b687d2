"""A small Qwen3-shaped model, trained from scratch on the Python standard library's own source text.

Hardware: any; designed for two CPU cores. Nothing is downloaded: the data is on every machine, and the first run
creates the model folder (config.json and a byte-level tokenizer) in runs/quickstart_model.

    python -m jaxtune.train --config=quickstart
"""

import json
import pathlib
import shutil
import sysconfig
import tempfile

from jaxtune.config import dataset, new_config
from jaxtune.errors import UserError

MODEL_FOLDER = pathlib.Path("runs/quickstart_model")
MODEL = {
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,  # each for three query heads
    "head_dim": 32,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
END, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (  # ChatML
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def get_config():
    """Return the config; create the model folder if it does not exist."""
    make_model_folder(MODEL_FOLDER, "Qwen3", MODEL)
    config = new_config()
    config.model.path = str(MODEL_FOLDER)
    config.model.from_scratch = True
    config.model.dtype = "float32"
    config.precision.recipe = "fp32"

    config.data.datasets = (dataset(path=sysconfig.get_paths()["stdlib"], glob="*.py", type="text"),)
    config.data.validation_split = 0.05
    config.data.seq_len = 256

    config.train.max_steps = 500
    config.train.micro_batch_size = 4

    config.optim.learning_rate = 5e-3
    config.optim.schedule = "cosine"
    config.optim.warmup_steps = 20
    config.optim.weight_decay = 0.1
    config.optim.beta2 = 0.95

    config.eval.steps = 100
    config.eval.max_batches = 20
    config.eval.sample_prompt = "def "
    config.log.every = 20
    config.log.next_command = "python -m jaxtune.train --config=quickstart_lora"
    return config


def make_model_folder(folder, kind, sizes):
    """Write a config.json of transformers' `kind` and the byte-level tokenizer, unless the folder exists.

    Raises:
        UserError: The folder was created with other sizes.
    """
    if folder.exists():
        existing = json.loads((folder / "config.json").read_text())
        if changed := [name for name in sizes if existing.get(name) != sizes[name]]:
            raise UserError(
                f"{folder} was created with another {', '.join(changed)}; remove it, and the runs that used it"
            )
        return
    import transformers  # here, because it takes seconds and only the first run needs it

    tokenizer = byte_tokenizer()
    end = tokenizer.convert_tokens_to_ids(END)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), eos_token_id=end, pad_token_id=end, architectures=[f"{kind}ForCausalLM"], **sizes
    ).save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    temporary.chmod(0o755)  # mkdtemp lets only its owner read it
    try:
        temporary.rename(folder)  # atomic, because other processes may create it at the same time
    except OSError:
        shutil.rmtree(temporary)
        if not folder.exists():
            raise


def byte_tokenizer():
    """Return a tokenizer with a token for each byte, and three for the ends of documents, and turns."""
    import tokenizers
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: token for token, character in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
