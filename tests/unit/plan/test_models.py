"""The models known to `plan` are those on the hub."""

import pytest

from jaxtune.models import families
from jaxtune.models.parameters import count, declare
from jaxtune.plan.tables.models import config_of

# As the hub counts them.
PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M-Instruct": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.1-405B-Instruct": 405_853_388_800,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "microsoft/phi-4": 14_659_507_200,
}
# Billions of parameters, as published; GLM-4.5-Air is cut, not rounded. Gemma 4 and Qwen3.5 count their text decoder,
# and ERNIE-4.5-VL-28B's is ERNIE-4.5-21B, cut too.
PUBLISHED = {
    "Qwen/Qwen3-30B-A3B-Base": "30.5",
    "Qwen/Qwen3-235B-A22B": "235",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "46.7",
    "openai/gpt-oss-20b": "20.9",
    "openai/gpt-oss-120b": "116.8",
    "zai-org/GLM-4.5-Air": "106",
    "deepseek-ai/DeepSeek-V3": "671",
    "google/gemma-4-31B-it": "30.7",
    "google/gemma-4-E2B-it": "4.6",
    "google/gemma-4-E4B": "7.5",
    "google/gemma-4-26B-A4B-it": "25.2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "31.6",
    "Qwen/Qwen3-VL-8B-Instruct": "8",
    "Qwen/Qwen3.5-9B": "9",
    "Qwen/Qwen3.5-27B": "27",
    "Qwen/Qwen3.8-27B": "27",
    "baidu/ERNIE-4.5-VL-28B-A3B-PT": "21",
}


def parameters(model: str) -> int:
    spec = families.read_spec(config_of(model))
    return count(declare(spec)[1], spec)


@pytest.mark.parametrize("model", PARAMETERS)
def test_a_known_model_has_as_many_parameters_as_on_the_hub(model):
    assert parameters(model) == PARAMETERS[model]


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_known_model_has_as_many_parameters_as_published(model):
    published = PUBLISHED[model]
    assert abs(parameters(model) / 1e9 - float(published)) < 10 ** -len(published.partition(".")[2])


def test_a_known_model_that_sees_has_its_tower():
    """Qwen3-VL-8B has 8.77 billion parameters on the hub, with its tower."""
    spec = families.read_spec(config_of("Qwen/Qwen3-VL-8B-Instruct"), vision=True)
    assert round(count(declare(spec)[1], spec) / 1e9, 2) == 8.77


def test_another_model_is_not_known():
    assert config_of("someone/else") is None
