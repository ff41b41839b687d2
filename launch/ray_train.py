"""Train on a Ray cluster, which starts the workers, and restarts all workers after a failure.

    pip install 'jaxtune[ray]'
    python launch/ray_train.py --workers=4 --gpus_per_worker=8 --config=qwen_full --config.train.hang_seconds=1800

RAY_ADDRESS names the cluster; without it, a cluster is started on this machine. A worker is one process, best with all
GPUs of a host. Paths are relative to the current folder, which must be on storage that every host sees, like
train.output_dir. After a restart the workers continue from the last checkpoint; Ray keeps no copy of it.
"""

import os
import socket
import sys
from functools import partial
from typing import Any

import ray
from absl import flags
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxConfig, JaxTrainer

from jaxtune import command
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.train import train


def work(job: dict[str, Any]) -> None:
    """Run a worker: connect to the others through jaxtune's usual environment variables, and train."""
    os.chdir(job["folder"])
    with socket.socket() as probe:  # a free port; process 0 binds it a moment later
        probe.bind(("", 0))
        coordinator = f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"
    os.environ["JAXTUNE_COORDINATOR"] = broadcast_from_rank_zero(coordinator)
    os.environ["JAXTUNE_NUM_PROCESSES"] = str(get_context().get_world_size())
    os.environ["JAXTUNE_PROCESS_ID"] = str(get_context().get_world_rank())
    train(job["config"])


def _define_flags(values: flags.FlagValues) -> None:
    number = partial(flags.DEFINE_integer, flag_values=values)
    number("workers", None, "workers", lower_bound=1, required=True)
    number("gpus_per_worker", 0, "GPUs of each worker; 0: train on the CPU", lower_bound=0)
    number("restarts", 3, "maximum number of restarts of all workers after failures", lower_bound=0)


def _main(values: flags.FlagValues, config: Config) -> None:
    if values.restarts and config.ckpt.resume != "auto":
        raise UserError(
            f"ckpt.resume={config.ckpt.resume!r}: restarts need 'auto' to continue the run; set it, or set --restarts=0"
        )
    gpus = values.gpus_per_worker
    JaxTrainer(
        work,
        train_loop_config={"config": config, "folder": os.getcwd()},
        # With use_gpu, Ray would initialise jax.distributed itself, and would number the GPUs of each worker from 0
        # even if a host has several workers.
        jax_config=JaxConfig(use_gpu=False),
        scaling_config=ScalingConfig(
            num_workers=values.workers,
            use_gpu=gpus > 0,
            resources_per_worker={"GPU": gpus} if gpus else {"CPU": 1},
        ),
        run_config=RunConfig(
            name=config.train.run_name,
            storage_path=os.path.abspath(config.train.output_dir),
            failure_config=FailureConfig(max_failures=values.restarts),
        ),
    ).fit()


main = partial(command.run, _define_flags, _main)

if __name__ == "__main__":
    sys.exit(main())
