"""The same step by transformers + peft: eager, SDPA by cuDNN or flash only, autocast to bfloat16 as in its Trainer."""

import gc

import peft
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu.qwen3 import ALPHA, CONFIGS, RANK
from gpu.torch_kernels import attention_kernels, device, synchronize
from gpu.train_step import row, shape, time_steps
from gpu.workers import Row


def measure(size: str, smoke: bool) -> Row:
    """Measure the step without rematerialisation, or with rematerialisation of whole blocks if it does not fit."""
    try:
        return _measure(size, smoke, remat=False)
    except torch.OutOfMemoryError:
        pass  # the traceback holds the model until here
    gc.collect()
    torch.cuda.empty_cache()
    return _measure(size, smoke, remat=True)


def _measure(size: str, smoke: bool, remat: bool) -> Row:
    config = transformers.Qwen3Config(**CONFIGS[size])
    config.use_cache = False
    torch.manual_seed(0)
    with torch.device(device()):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if remat:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=device() == "cuda")
    tokens = torch.randint(config.vocab_size, shape(smoke), device=device())
    losses = []

    def micro(rows: torch.Tensor) -> torch.Tensor:
        backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
        with sdpa_kernel(backends, set_priority=True), torch.autocast(device(), torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss / len(tokens)
            loss.backward()
        return loss.detach()

    def step() -> None:
        loss = sum(micro(rows) for rows in tokens)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        synchronize()

    kernels = attention_kernels(lambda: micro(tokens[0]))
    optimizer.zero_grad()
    seconds = time_steps(step, 2 if smoke else 5)
    name = torch.cuda.get_device_name() if device() == "cuda" else "cpu"
    result = row(CONFIGS[size], shape(smoke), seconds, name) | {"remat": "block" if remat else "none", "losses": losses}
    if device() == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return result | {"kernels": kernels}
