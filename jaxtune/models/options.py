"""The options of sections `attention`, `experts` and `vision`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import Config, Problem, option, problem

# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class AttentionOptions:
    """The attention kernel."""

    backend: Literal["auto", "cudnn", "fa3", "flash", "mosaic", "triton", "xla"] = option("auto",
        "attention kernel; auto: the first one tested on this kind of GPU; fa3: FlashAttention 3 for Hopper; flash: "
        "FlashAttention 2 or 3, by the GPU; each a package of its own (pip install 'jaxtune[hopper]', "
        "'jaxtune[flash-cuda12]' or 'jaxtune[flash-cuda13]')", basic=True,
        also="attn_implementation flash_attention flash_attn use_flash_attention")
    fallback: Literal["error", "warn"] = option("error",
        "if that kernel cannot run: refuse and explain why (error), or warn and use auto",
        when="attention.backend != 'auto'")
    documents_per_row: int = option(32,
        "most documents in a row with fa3 and flash; data with more is refused, and the error names the number needed; "
        "unused slots cost memory, and with fa3 time, in the backward pass", "[1, inf)",
        when="attention.backend in ('fa3', 'flash')")

    @property
    def max_documents_per_row(self) -> int | None:
        """The most documents that the kernel supports in a row; None: any number."""
        return self.documents_per_row if self.backend in ("fa3", "flash") else None


@dataclass(frozen=True)
class ExpertsOptions:
    """Computation and load balancing of a mixture of experts."""

    backend: Literal["auto", "dense", "loop", "kernel"] = option("auto",
        "kernel: GPU kernels run only the routed experts of each token; loop: the same in XLA; dense: every expert on "
        "every token, which low precision needs; auto: the first that can run",
        also="expert_backend moe_implementation experts_implementation moe_grouped_gemm")
    dispatch: Literal["all_gather", "all_to_all"] = option("all_gather",
        "how tokens reach experts on other devices: all_gather: each device gets all tokens; all_to_all: only those "
        "routed to its experts", when="mesh.expert != 1", also="ep_dispatch moe_token_dispatcher_type")
    capacity_factor: float = option(1.25,
        "rows that a device sends to each other device per round, relative to even routing; the rest follow in "
        "further rounds, none are dropped. Lower takes less memory, higher fewer rounds", "(0, inf)",
        when="experts.dispatch == 'all_to_all'",
        also="moe_expert_capacity_factor moe_capacity_factor expert_capacity_factor")
    router_loss: float | None = option(None,
        "coefficient of the load-balancing loss (Switch Transformer, 2021), a mean over layers, added to the training "
        "loss; unset: from config.json", "[0, inf)",
        also="router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff aux_loss_alpha")
    router_loss_over: Literal["batch", "sequence"] = option("batch",
        "load that is balanced: batch: of a micro-batch on all devices, as in transformers; sequence: of each row "
        "(DeepSeek-V3, 2024)", when="experts.router_loss")
    router_z_loss: float = option(0.0,
        "coefficient of the mean of log(sum(exp(router logits)))^2, added to the training loss (router z-loss of "
        "ST-MoE, 2022)", "[0, inf)", also="router_z_loss_coef moe_z_loss_coeff")
    bias_update_rate: float = option(0.0,
        "update rate of the router's expert biases (auxiliary-loss-free balancing, DeepSeek-V3, 2024): added below a "
        "layer's mean load, subtracted above it; 0: biases stay fixed", "[0, inf)",
        when="not lora.enabled", also="moe_router_bias_update_rate bias_update_speed")


@dataclass(frozen=True)
class VisionOptions:
    """Training on images, by the vision tower of a model that has one."""

    patches_per_row: int | None = option(None,
        "patches of images that fit in a row, in addition to data.seq_len tokens; unset: no images, and only the "
        "model's decoder is loaded", "[1, inf)", basic=True, also="encoders")
    train: Literal["none", "projector", "tower"] = option("none",
        "what is trained of the vision tower: nothing; the projector, which makes embeddings of its outputs; or the "
        "tower and the projector", when="vision.patches_per_row is not None", basic=True,
        also="freeze_vision_tower freeze_vit freeze_aligner freeze_multi_modal_projector")
    max_pixels: int | None = option(None,
        "a larger image is scaled down to this many pixels; unset: the model's image processor has the limit",
        "[1, inf)", when="vision.patches_per_row is not None", also="image_max_pixels image_resize")
    min_pixels: int | None = option(None,
        "a smaller image is scaled up to this many pixels; unset: the model's image processor has the limit",
        "[1, inf)", when="vision.patches_per_row is not None", also="image_min_pixels")
    norm_bbox: Literal["norm1000", "none"] | None = option(None,
        "how boxes of column objects are written: in thousandths of the image's sides, or in pixels after resizing "
        "(none); unset: as the model was trained, none for qwen2_5_vl", when="vision.patches_per_row is not None")
# fmt: on


def check_attention(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `attention` with others."""
    if config.attention.backend in ("fa3", "flash") and config.train.deterministic:
        reason = (
            "its backward pass sums in no fixed order, so runs are not bit-identical; set "
            "attention.backend = 'auto' or 'triton', which are deterministic, or train.deterministic = False"
        )
        yield problem(config, "attention.backend", reason, "train.deterministic")
    if config.train.attention_dropout and config.attention.backend not in ("auto", "xla"):
        reason = "no kernel supports it; set attention.backend = 'xla', or use train.hidden_dropout"
        yield problem(config, "train.attention_dropout", reason, "attention.backend")


def check_vision(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `vision` with others."""
    if config.vision.patches_per_row is None:
        return
    if config.distill.own_answers:
        reason = "prompts of distillation have no images; set distill.own_answers = 0, and the answers are in the data"
        yield problem(config, "vision.patches_per_row", reason, "distill.own_answers")
    if config.rollout.tools or config.rollout.environment is not None:
        key = "rollout.tools" if config.rollout.tools else "rollout.environment"
        yield problem(config, "vision.patches_per_row", "the prompts of episodes have no images", key)
    elif config.rollout.server is not None:
        reason = "a server gets the tokens of prompts only; leave rollout.server out, and the run samples itself"
        yield problem(config, "vision.patches_per_row", reason, "rollout.server")
    if config.sample_type in ("classification", "decision"):
        reason = "samples with labels or questions have no images"
        yield problem(config, "vision.patches_per_row", reason)
    if config.data.streaming:
        reason = "rows with images are planned by the sizes of all images, which a stream does not know"
        yield problem(config, "vision.patches_per_row", reason, "data.streaming")
