"""Exports that vLLM cannot load, or loads only with a flag: read in its source, formats tried on CPUs."""

from jaxtune.config.schema import Config
from jaxtune.lora.lora import LoRA
from jaxtune.weights.model import Model

TRIED = "vLLM 0.32"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
DEFAULT_RANK = 16
_ONLY_INT4 = "of the quantized formats it loads int4 there"
_FORMATS = {
    "nf4": f"{TRIED} cannot load nf4: serve int4, or load it with transformers and bitsandbytes",
    "fp8": f"{TRIED} cannot load fp8 on CPUs without AMX; {_ONLY_INT4}",
    **{kind: f"{TRIED} cannot load {kind} on CPUs; {_ONLY_INT4}" for kind in ("int8", "nvfp4", "mxfp4")},
}


def adapter_limit(model: Model, config: Config) -> str | None:
    """Return why vLLM cannot serve an adapter, or the flag that it needs; None: it serves it as it is."""
    lora, adapted = config.lora, {n: p for n, p in model.frozen.items() if isinstance(p.treatment.adapter, LoRA)}
    rank = max([parameter.treatment.adapter.exported_rank_alpha[0] for parameter in adapted.values()], default=0)
    reasons = {
        "it is (IA)³": lora.kind == "ia3",
        "it has DoRA (lora.use_dora)": lora.use_dora,
        "modules are trained in full (lora.modules_to_save)": bool(lora.modules_to_save),
        "biases are trained (lora.bias)": lora.bias != "none",
        f"its rank, {rank}, is larger than {RANKS[-1]}": rank > RANKS[-1],
    }
    if found := [reason for reason, is_so in reasons.items() if is_so]:
        return f"{TRIED} cannot serve this adapter, because {' and '.join(found)}: export the whole model with --merge"
    limits = []
    if rank > DEFAULT_RANK:
        limits.append(f"vLLM needs --max-lora-rank={min(most for most in RANKS if most >= rank)} for this adapter")
    if any(len(parameter.lead) > 1 for parameter in adapted.values()):
        limits.append(f"{TRIED} on CPUs cannot serve adapters of experts: export with --merge for them")
    if any(name.startswith("vision.") for name in adapted):
        limits.append("vLLM ignores a vision tower's adapters without --enable-tower-connector-lora (not tried)")
    return "; ".join(limits) or None


def format_limit(quantize: str | None) -> str | None:
    """Return where vLLM cannot load a whole model in a format; None: no limit is known."""
    return None if quantize is None else _FORMATS.get(quantize)
