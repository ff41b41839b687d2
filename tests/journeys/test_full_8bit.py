"""Full fine-tuning with 8-bit AdamW as processes: trained, killed, resumed, exported."""

from journey import journey, loads_in_transformers
from runs import run


def test_qwen_full_8bit_trains_is_killed_resumes_exports_and_loads(home):
    folder = journey(home, "qwen_full_8bit.py", **{"optim.learning_rate": 1e-3})
    run("jaxtune.export", f"--run={folder}", f"--output={home / 'exported'}")
    loads_in_transformers(home / "exported")
