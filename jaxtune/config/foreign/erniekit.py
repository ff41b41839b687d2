"""Options of ERNIEKit that are translated together (see `conversions`)."""

import re
from pathlib import PurePosixPath
from typing import Any

from jaxtune.config.foreign.conversions import Options, Settings, Unsupported, saves_of, strategy_of


def ernie_train(o: Options) -> Settings:
    """Paths, types and probabilities, comma-separated, and how they are mixed.

    'random', their first and only strategy for long, draws samples by probability without an end, so small datasets
    repeat; 'concat' reads no probabilities (ernie/dataset/mix_datasets.py and docs/datasets.md of ERNIE).
    """
    strategy = o.get("mix_strategy", "random")
    if strategy not in ("random", "concat", "interleave_under", "interleave_over"):
        raise Unsupported("mix_strategy is one of random, concat, interleave_under, interleave_over")
    if o.get("do_train") is False:
        return {"data.datasets": []}
    entries = _ernie_entries(o, "train") if o.get("train_dataset_path") else []
    if len(entries) > 1 and strategy != "concat":
        mixing = "interleave_over" if strategy == "random" else strategy
        return {"data.datasets": entries, "data.mixing": mixing}
    return {"data.datasets": [{key: value for key, value in entry.items() if key != "weight"} for entry in entries]}


def ernie_eval(o: Options) -> Settings:
    """Evaluation runs only with do_eval and a strategy. It takes each dataset whole, unless its probability is 0.

    Their validation data are concatenated (mix_datasets.py, is_valid), whatever the strategy of the training data. Here
    datasets with a name of their own are never mixed.
    """
    strategy = strategy_of(o["evaluation_strategy"])
    if not o["do_eval"] or strategy == "no" or not o.get("eval_dataset_path"):
        return {}
    most = o["max_evaluate_steps"]
    entries = [{key: value for key, value in entry.items() if key != "weight"} for entry in _ernie_entries(o, "eval")]
    if len(entries) > 1:
        stems = [re.sub(r"[^A-Za-z0-9_.-]", "_", PurePosixPath(entry["path"]).stem) or "data" for entry in entries]
        names = [f"{stem}_{i}" if stems.count(stem) > 1 else stem for i, stem in enumerate(stems)]
        entries = [entry | {"name": name} for entry, name in zip(entries, names)]
    settings: Settings = {"data.eval_datasets": entries, "eval.max_batches": most if most > 0 else None}
    if strategy == "epoch":
        return settings | {"eval.epochs": 1.0}
    return settings | ({"eval.steps": o["eval_steps"]} if o.get("eval_steps") else {})


def ernie_samples(o: Options) -> Settings:
    """Samples in an epoch, only for the strategy 'random' (docs/datasets.md); by default there is no limit."""
    limit = o["num_samples_each_epoch"]
    # 6,000,000 is their default.
    return {"data.samples_per_epoch": limit} if limit != 6000000 and o.get("mix_strategy", "random") == "random" else {}


def ernie_run(o: Options) -> Settings:
    """A file that says false has no training data, so that `jaxtune train` refuses it and names `jaxtune evaluate`.

    Their default, false, is that of a script whose command line says what it does.
    """
    if o.get("do_train") is False and "data.eval_datasets" not in ernie_eval(o):
        raise Unsupported("a file that neither trains nor evaluates; set do_train, or do_eval with eval_dataset_path")
    return ernie_train(o)


def ernie_dropout(o: Options) -> Settings:
    """Both rates, which grow with the layer's number (ernie/callbacks/layerwise_dropout_callback.py)."""
    hidden, attention = o["hidden_dropout_prob"], o["attention_probs_dropout_prob"]  # their names of config.json
    settings: Settings = {"train.hidden_dropout": hidden, "train.attention_dropout": attention}
    return settings | ({"train.dropout_by_depth": True} if hidden or attention else {})


def ernie_stage(o: Options) -> Settings:
    """Preference options apply only with stage: DPO. Reference-free losses have no reference to update."""
    stage = _ernie_stage(o)
    if stage in ("SFT", "PT"):
        return {}
    losses = ("sigmoid", "ipo", "kto_pair", "simpo", "orpo")
    if stage != "DPO":
        raise Unsupported("the stages are SFT, PT and DPO; models that see (VL-SFT) are not trained")
    if o["loss_type"] not in losses:
        raise Unsupported(f"for DPO, loss_type is one of {', '.join(losses)}", "loss_type")
    loss, no_reference = o["loss_type"], o["loss_type"] in ("simpo", "orpo")
    settings: Settings = {"preference.loss": loss, "preference.beta": o["beta"]}
    settings |= {"preference.loss_weight": o["pref_loss_ratio"], "preference.sft_weight": o["sft_loss_ratio"]}
    # A setting of every dataset, because theirs is global.
    settings |= {"data.datasets[i].max_prompt_tokens": o["max_prompt_len"]}
    if loss in ("sigmoid", "simpo"):
        settings["preference.label_smoothing"] = o["label_smoothing"]
    if loss == "sigmoid":
        settings["preference.offset_alpha"] = o["offset_alpha"]
    if loss == "simpo":
        settings["preference.simpo_gamma"] = o["simpo_gamma"]
    if not no_reference and o["reference_free"]:
        settings["preference.reference"] = None
    elif not no_reference and o["ref_model_update_steps"] > 0:
        settings["preference.reference_update_steps"] = o["ref_model_update_steps"]  # steps between copies of the model
    return settings


def _ernie_stage(o: Options) -> str:
    return str(o["stage"]).upper()


# Samples of each type, by stage (docs/datasets.md of ERNIE; paddleformers/datasets/reader/convertor.py). `system` and
# `tools` are columns of a sample, which a dataset of a given type reads only by name. An instruction and its input are
# one text without a separator (_alpaca_sft_to_erine in ernie/dataset/hf/hf_parser.py).
_SAMPLES: dict[str, dict[str, Settings]] = {
    "SFT": {
        "erniekit": {"type": "conversation", "system_field": "system"},
        "alpaca": {
            "type": "instruction",
            "instruction_field": "{instruction}{input}",
            "input_field": None,
            "system_field": "system",
        },
        "messages": {"type": "conversation", "tools_field": "tools"},
        "chatml": {"type": "conversation", "tools_field": "tools"},
    },
    "PT": {"erniekit": {"type": "text"}},
    "DPO": {"erniekit": {"type": "preference"}, "alpaca": {"type": "preference"}},
}


def _ernie_entries(o: Options, part: str) -> list[Settings]:
    types = _SAMPLES.get(_ernie_stage(o), _SAMPLES["SFT"])
    paths, kinds = _split(o[f"{part}_dataset_path"]), _split(o[f"{part}_dataset_type"])
    try:
        shares = [float(share) for share in _split(o[f"{part}_dataset_prob"])]
    except ValueError:
        raise Unsupported(f"{part}_dataset_prob must be comma-separated numbers", f"{part}_dataset_prob") from None
    if unknown := [kind for kind in kinds if kind not in types]:
        kinds_of_stage = f"for {_ernie_stage(o)}, {part}_dataset_type is one of {', '.join(types)}"
        raise Unsupported(f"data of type {unknown[0]}; {kinds_of_stage}", f"{part}_dataset_type")
    if len(paths) == 1:  # a probability of a single dataset means nothing
        return [{"path": paths[0], **types[kinds[0]]}]
    kinds = kinds * len(paths) if len(kinds) == 1 else kinds  # one type for all paths
    if not len(paths) == len(kinds) == len(shares):
        raise Unsupported(
            f"{len(paths)} paths with {len(shares)} of {part}_dataset_prob and {len(kinds)} of {part}_dataset_type; "
            "give one to each"
        )
    # A dataset with a probability of 0 is left out (MultiSourceDataset in ernie/dataset/base.py).
    return [
        {"path": path, **types[kind], "weight": share} for path, kind, share in zip(paths, kinds, shares) if share > 0
    ]


def _split(text: Any) -> list[str]:
    # A YAML list is not in their documents, but says the same.
    parts = text if isinstance(text, list) else str(text).split(",")  # "a.jsonl, b.jsonl"
    return [stripped for part in parts if (stripped := str(part).strip())]


def ernie_rate(o: Options) -> Settings:
    """The learning rate; without one, the rate that their reference recommends for what is trained."""
    if o.get("learning_rate") is not None:
        return {"optim.learning_rate": o["learning_rate"]}
    # By (whether the stage is DPO, whether adapters are trained).
    recommended = {(False, False): 3e-5, (False, True): 3e-4, (True, False): 1e-6, (True, True): 1e-5}
    return {"optim.learning_rate": recommended[_ernie_stage(o) == "DPO", _ernie_lora(o)]}


def ernie_decay(o: Options) -> Settings:
    """Norms and biases have no weight decay, embeddings have (create_optimizer in erniekit/train/dpo/trainer.py).

    Adapters are neither, and a pattern must match something.
    """
    if not o["weight_decay"] or _ernie_lora(o):
        return {"optim.weight_decay": o["weight_decay"]}
    return {"optim.weight_decay": o["weight_decay"], "optim.no_decay": "norm|bias"}


def ernie_dispatch(o: Options) -> Settings:
    """An empty value sends tokens to their experts, others gather all tokens (moe_cls in ernie/modeling_moe.py)."""
    return {"experts.dispatch": "all_gather" if o["moe_multimodal_dispatch_use_allgather"] else "all_to_all"}


# Words of unified_checkpoint_config (UnifiedCheckpointOption in paddleformers).
_CHECKPOINTS = ("async_save", "ignore_merge_optimizer", "skip_save_model_weight", "master_weight_compatible")
_CHECKPOINTS += ("remove_master_weight", "enable_all_options")


def ernie_checkpoint(o: Options) -> Settings:
    """Each word is what checkpoints here always are; the note says how. remove_master_weight makes them smaller."""
    words = re.findall(r"\w+", str(o["unified_checkpoint_config"]))
    if unknown := [word for word in words if word not in _CHECKPOINTS]:
        raise Unsupported(f"{unknown[0]}; the words of unified_checkpoint_config are {', '.join(_CHECKPOINTS)}")
    return {}


# Operations of Paddle's AMP lists that have one dtype here, whatever a list says.
_LOW = "lookup_table|flash_attn|matmul|fused_gemm_epilogue|linear"
_FLOAT32 = "softmax|softmax_with_cross_entropy|layer_norm|rms_norm|reduce_sum|reduce_mean|cross_entropy|log|exp"


def ernie_amp(o: Options) -> Settings:
    """Lists that agree with the dtypes here; others would change what is computed."""
    for option, refused, text in (
        ("amp_custom_white_list", _FLOAT32, "in float32; leave it out of amp_custom_white_list"),
        ("amp_custom_black_list", _LOW, "in the recipe's dtype; leave it out of amp_custom_black_list"),
    ):
        for word in re.findall(r"\w+", str(o.get(option))):
            if re.fullmatch(rf"(c_|fused_)?({refused})(_v2)?", word):  # Paddle's variants: c_softmax, matmul_v2
                raise Unsupported(f"jaxtune computes {word} {text}")
    return {}


def ernie_rates(o: Options) -> Settings:
    """Some options are read by only one schedule."""
    schedule = o["lr_scheduler_type"]
    if schedule not in ("linear", "cosine", "polynomial", "constant", "constant_with_warmup"):
        raise Unsupported("the schedules are linear, cosine, polynomial, constant and constant_with_warmup")
    settings: Settings = {"optim.schedule": schedule.removesuffix("_with_warmup")}
    if schedule == "cosine":
        settings |= {"optim.min_lr": o["min_lr"], "optim.cycles": o["num_cycles"]}
    if schedule == "polynomial":
        settings |= {"optim.min_lr": o["lr_end"], "optim.power": o["power"]}
    return settings


def ernie_precision(o: Options) -> Settings:
    """compute_type, fp16 and bf16 all set the precision recipe; float32 if bf16 is false and no other is set."""
    named = "fp16" if o.get("fp16") else "bf16" if o["bf16"] else "fp32"
    kind = o.get("compute_type")
    if kind not in (None, "bf16", "fp16", "fp32", "fp8", *_WEIGHTS_BY_TYPE):
        raise Unsupported(f"compute_type is one of bf16, fp16, fp32, fp8, {', '.join(_WEIGHTS_BY_TYPE)}")
    # Types other than fp16 compute in bfloat16 (FinetuningArguments.__post_init__ in erniekit/hparams).
    named = kind if kind in ("fp16", "fp32") else "bf16" if kind else named
    stored = {"fp16": "float16", "fp32": "float32"}.get(named, "bfloat16")
    # Paddle's AMP: O1 keeps the weights in float32; O2 also keeps gradients in bfloat16, unless amp_master_grad is set.
    stored = "float32" if o.get("fp16_opt_level") == "O1" else stored
    fp8 = _ernie_algorithm(o) == "fp8_linear" and not _ernie_lora(o)
    settings: Settings = {"precision.recipe": "fp8_hybrid" if fp8 else named, "model.dtype": stored}
    if named == "bf16" and not fp8 and o.get("fp16_opt_level") == "O2" and not o["amp_master_grad"]:
        settings["precision.gradient_dtype"] = "bfloat16"
    if fp8:
        steps = o["apply_online_actscale_step"]
        settings |= {"precision.fp8.hadamard": o["apply_hadamard"], "precision.fp8.online_scale_steps": steps}
    return settings


# Quantized weights by compute_type, and all formats by weight_quantize_algo (erniekit/hparams/finetuning_args.py).
_WEIGHTS_BY_TYPE = {"wint8": "weight_only_int8", "wint4/8": "weight_only_mix", "nf4": "nf4"}
_FORMATS = {"weight_only_mix": "weight_only_mix", "weight_only_int8": "int8", "fp8_linear": "fp8", "nf4": "nf4"}


def _ernie_algorithm(o: Options) -> str | None:
    """Return the algorithm that quantizes weights; only compute_type decides, as in FinetuningArguments."""
    if kind := o.get("compute_type"):
        return "fp8_linear" if kind == "fp8" else _WEIGHTS_BY_TYPE.get(kind)
    algorithm = o.get("weight_quantize_algo")
    return "fp8_linear" if algorithm == "fp8linear" else algorithm


def ernie_lora(o: Options) -> Settings:
    """alpha -1 means twice the rank, or 4 with rslora. rslora_plus means rslora, alpha 4 and lr_ratio 4."""
    if not _ernie_lora(o):
        return {"lora.enabled": False}
    plus = bool(o["rslora_plus"])
    scaled, rate = o["rslora"] or plus, 4.0 if plus else float(o["lora_plus_scale"])
    alpha = o["lora_alpha"]
    alpha = (4 if scaled else 2 * o["lora_rank"]) if alpha == -1 or plus else alpha
    settings: Settings = {"lora.enabled": True, "lora.rank": o["lora_rank"], "lora.alpha": float(alpha)}
    return settings | {"lora.use_rslora": bool(scaled), "lora.lr_ratio": rate}


def _ernie_lora(o: Options) -> bool:
    """Whether adapters are trained. Only fine_tuning decides (ModelArguments.__post_init__)."""
    method = o.get("fine_tuning")
    return bool(o["lora"]) if method is None else str(method).lower() == "lora"


def ernie_quant(o: Options) -> Settings:
    """The format of a frozen base; for trained weights, fp8_linear is a precision recipe."""
    algorithm = _ernie_algorithm(o)
    if algorithm not in (None, *_FORMATS):
        raise Unsupported(f"weight_quantize_algo is one of {', '.join(_FORMATS)}")
    if algorithm is None or (algorithm == "fp8_linear" and not _ernie_lora(o)):
        return ernie_precision(o) if algorithm else {}
    return {"quant.format": _FORMATS[algorithm]}


def ernie_compute(o: Options) -> Settings:
    """compute_type: the recipe, and the format of a frozen base."""
    return ernie_precision(o) | (ernie_quant(o) if o.get("compute_type") else {})


def ernie_moments(o: Options) -> Settings:
    """compute_type: fp8 has moments in bfloat16 (FinetuningArguments.__post_init__)."""
    low = o["use_lowprecision_moment"] or o.get("compute_type") == "fp8"
    return {"optim.state_dtype": "bfloat16" if low else "float32"}


def ernie_sharding(o: Options) -> Settings:
    """Replicas take the devices that sharding leaves."""
    degree = o.get("sharding_parallel_degree")
    if degree is None or degree == -1:  # all devices shard
        return {"mesh.fsdp": -1}
    return {"mesh.fsdp": max(degree, 1), "mesh.data": -1}  # -1: the devices that remain


def ernie_remat(o: Options) -> Settings:
    """The rematerialisation policy, or none."""
    # full_attn recomputes attention with its projections, core_attn without them.
    policies = {"full": "block", "full_attn": "attention+qkv", "core_attn": "dots"}
    if o["recompute_granularity"] not in policies:
        raise Unsupported(f"recompute_granularity is one of {', '.join(policies)}")
    return {"memory.remat": policies[o["recompute_granularity"]] if o["recompute"] else "none"}


def ernie_offload(o: Options) -> Settings:
    """Switches for one option; offloading here is always layer by layer, like their tensorwise variant.

    It saves memory and changes no result, so pipeline stages, with which it does not work here, train without it.
    """
    wanted = o["offload_optim"] or o["tensorwise_offload_optimizer"] or o.get("compute_type") == "fp8"
    return {"memory.offload_optimizer": bool(wanted and o.get("pipeline_parallel_degree", 1) <= 1)}


def ernie_save(o: Options) -> Settings:
    """Checkpoints by steps, by epochs, or never."""
    return saves_of(o["save_strategy"], o["save_steps"])
