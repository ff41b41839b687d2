"""LoRA trained by processes, killed, resumed, exported and merged; the results load in transformers and peft."""

import numpy as np
import pytest
from journey import check_killed_run, check_resumed_run, load_in_transformers
from runs import call, run


def test_qwen_lora_trains_is_killed_resumes_exports_and_loads(home):
    folder = check_killed_run(home, "qwen_lora.py")
    call("jaxtune.export", f"--run={folder}", f"--output={home / 'merged'}", "--merge")
    call("jaxtune.generate", f"--model={home / 'merged'}", "--prompt=say 3", "--chat", "--max_new_tokens=8")
    run("jaxtune.export", f"--run={folder}", f"--output={home / 'five'}", devices=5)  # the export uses four of the five

    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    plain = {name: value.clone() for name, value in base.state_dict().items()}
    adapted = peft.PeftModel.from_pretrained(base, folder / "export").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(home / "merged", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "merged")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ours, theirs = merged(**prompt).logits.numpy(), adapted(**prompt).logits.numpy()
    # The merged model is in bfloat16, as the recipe stores it.
    assert np.abs(ours - theirs).max() <= 0.02 * np.abs(theirs).max()
    assert not torch.equal(
        merged.state_dict()["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.nightly
def test_an_adapter_that_begins_as_a_part_of_the_weight_resumes_exactly_and_loads(home):
    options = {
        "lora.init": "pissa",
        "lora.use_dora": True,
        "lora.modules_to_save": "('norm',)",
        "model.dtype": "float32",
    }
    folder, _ = check_resumed_run(home, "qwen_lora.py", "pissa", **options)
    call("jaxtune.export", f"--run={folder}", f"--output={home / 'pissa-merged'}", "--merge")
    load_in_transformers(home / "pissa-merged", home / "model", folder / "export", within=1e-4)
