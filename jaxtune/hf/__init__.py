"""Hugging Face folders, read and written: config, weights, tokenizer, PEFT adapters, model card; and uploads."""

from jaxtune.hf.chat_templates import describe_template
from jaxtune.hf.description import (
    SINGLE_MODEL_DEFAULTS,
    Folders,
    apply_options,
    find_folders,
    parse_overrides,
    read_described_config,
)
from jaxtune.hf.larger_model import named_as_in_files, with_untouched
from jaxtune.hf.model_card import Evaluation, write_card
from jaxtune.hf.model_folder import (
    label_names,
    read_config,
    read_generation_config,
    resolve,
    staging_folder,
    write_config,
)
from jaxtune.hf.peft import SavedAdapter, adapted_modules, read_adapter, write_adapter
from jaxtune.hf.quantized.prequantized import Scheme, read_quantized, read_scheme
from jaxtune.hf.quantized.written import quantization_config, quantize
from jaxtune.hf.tensors.tensor_reading import (
    Conversion,
    Target,
    check_tensors,
    check_weights,
    read,
    read_tensors,
)
from jaxtune.hf.tensors.tensor_sources import open_weights, weight_files
from jaxtune.hf.tensors.tensor_writing import OutputTensor, write
from jaxtune.hf.tokenizer import (
    choose_padding,
    copy_tokenizer_files,
    decode,
    end_tokens,
    load_tokenizer,
    write_chat_template,
    write_turn_end,
)
from jaxtune.hf.upload import check_upload, upload
from jaxtune.quant.options import SCHEMES
