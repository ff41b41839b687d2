"""LoRA fine-tuning of the quickstart's model, on the source text of another part of the library.

Hardware: any; designed for two CPU cores. Run the quickstart first.

    python -m jaxtune.train --config=quickstart_lora
"""

import sysconfig

from jaxtune.config import dataset
from jaxtune.recipes import quickstart


def get_config():
    """Return the quickstart's config, with its exported model, adapters and other data."""
    config = quickstart.get_config()
    config.model.path = "runs/quickstart/export"
    config.model.from_scratch = False
    config.data.datasets = (dataset(path=sysconfig.get_paths()["stdlib"], glob="email/*.py", type="text"),)

    config.lora.enabled = True
    config.lora.rank = 8
    config.lora.alpha = 16.0

    config.train.max_steps = 60
    config.optim.learning_rate = 1e-3
    config.optim.warmup_steps = 5
    config.optim.weight_decay = 0.0
    config.eval.steps = 20
    config.log.next_command = "python -m jaxtune.export --run=runs/quickstart_lora --output=merged --merge"
    return config
