"""A small DeepSeek-V3-shaped mixture of experts, trained from scratch on the Python standard library's source text.

It has latent attention and 16 experts; each token is routed to 3 experts and one shared expert. Load balancing is
auxiliary-loss-free: each step adjusts the bias of an expert's score by how often it was chosen. `:dense` is a dense
model with as many parameters as a token uses here: 0.66 million of 1.63.

Hardware: any; designed for two CPU cores. Nothing is downloaded, as in the quickstart. Results with one seed: the final
validation loss, the mean training loss of the last 100 steps, the mean expert_load_worst of the last 200, and minutes
on one core:

    model    steps  validation  training  load  minutes
    mixture    600      1.5054    1.6100  1.56      5.3
    dense      600      1.5206    1.6246            4.1
    mixture   1200      1.3069    1.3716  1.47
    dense     1200      1.3117    1.3805

The mixture starts behind (2.259 and 2.220 after 100 steps), until its routers are balanced: expert_load_worst is 4.1 in
the first 20 steps, and 1.8 in steps 100 to 200.

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
    "n_group": 1,  # experts are not chosen by groups
    "topk_group": 1,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MODELS = {"mixture": MIXTURE, "dense": MIXTURE | {"first_k_dense_replace": MIXTURE["num_hidden_layers"]}}


def get_config(model="mixture"):
    """Return the quickstart's config with a "mixture" or "dense" model; create its folder if it does not exist."""
    folder = pathlib.Path(f"runs/deepseek_v3_tiny_{model}_model")
    quickstart.make_model_folder(folder, "DeepseekV3", MODELS[model])
    config = quickstart.get_config()
    config.model.path = str(folder)
    config.memory.remat = "none"
    config.train.max_steps = 600
    config.train.micro_batch_size = 8
    if model == "mixture":
        # At the learning rate of the other parameters, router scores would change faster than the expert biases.
        config.optim.lr_multipliers = ("mlp.gate.weight=0.1",)
        config.experts.bias_update_rate = 1e-2
    else:
        config.train.run_name = "deepseek_v3_tiny_dense"
    config.log.next_command = None
    return config
