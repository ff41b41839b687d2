"""A small DeepSeek-V3-shaped mixture of experts, trained from scratch on the Python standard library's source text.

Latent attention; 16 experts, of which a token goes to 3 and to a shared one, balanced without a loss: a step moves what
is added to the scores of an expert by how often it was chosen. `:dense` is its twin, of the size that a token passes
here: 0.66 million parameters of 1.63.

Hardware: any; made for two CPU cores. As for the quickstart, nothing is downloaded. With one seed, the loss in the end,
of validation and of the last 100 steps, and expert_load_worst, the mean of the last 200; minutes on one core:

    model    steps  validation  training  load  minutes
    mixture    600      1.5054    1.6100  1.56      5.3
    dense      600      1.5206    1.6246            4.1
    mixture   1200      1.3069    1.3716  1.47
    dense     1200      1.3117    1.3805

The mixture starts behind (2.259 and 2.220 after 100 steps), while its routers become balanced: expert_load_worst is 4.1
in the first 20 steps, and 1.8 from 100 to 200.

    python -m jaxtune.train --config=deepseek_v3_tiny_pretrain
    python -m jaxtune.train --config=deepseek_v3_tiny_pretrain:dense
"""

import pathlib

from jaxtune.recipes import quickstart

MIXTURE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "intermediate_size": 256,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MODELS = {"mixture": MIXTURE, "dense": MIXTURE | {"first_k_dense_replace": MIXTURE["num_hidden_layers"]}}


def get_config(model="mixture"):
    """The quickstart's recipe with another model, "mixture" or "dense"; makes its folder if it does not exist."""
    folder = pathlib.Path(f"runs/deepseek_v3_tiny_{model}_model")
    quickstart.make_model_folder(folder, "DeepseekV3", MODELS[model])
    config = quickstart.get_config()
    config.model.path = str(folder)
    config.memory.remat = "none"
    config.train.max_steps = 600
    config.train.micro_batch_size = 8
    if model == "mixture":
        # At the others' learning rate a router's scores move faster than their corrections.
        config.optim.lr_multipliers = ("mlp.gate.weight=0.1",)
        config.experts.bias_update_rate = 1e-2
    else:
        config.train.run_name = "deepseek_v3_tiny_dense"
    config.log.next_command = None
    return config
