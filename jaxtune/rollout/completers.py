"""Where completions come from: the devices of the run, or a server."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxtune.config.schema import Config
from jaxtune.data.formats.prompts import Prompts
from jaxtune.data.images.image_reader import KeepingReader
from jaxtune.image_layout import ImageRef
from jaxtune.inference.decode import Sampling
from jaxtune.inference.generation import (
    Completion,
    collect_completions,
    decoding_weights,
    make_generate,
    make_stop_test,
    stop_tokens,
)
from jaxtune.inference.prompt_images import PromptImages
from jaxtune.models.decoder import Parameters
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel import multihost
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import recipe_of
from jaxtune.rollout import completion_server
from jaxtune.rollout.sent_weights import SentWeights, WrittenWeights
from jaxtune.rollout.server_pool import ServerPool
from jaxtune.training.assembly import open_images
from jaxtune.weights.model import Model


class Complete(Protocol):
    """Samples completions."""

    def __call__(
        self,
        weights: Any,
        prompts: list[list[int]],
        numbers: Sequence[int],
        written: Sequence[int] | None = None,
        images: Sequence[tuple[ImageRef, ...]] | None = None,
    ) -> list[Completion]:
        """Return a completion of each prompt.

        Args:
            weights: what `Completer.prepare` returned.
            prompts: their tokens.
            numbers: the number of each completion, which selects its random numbers.
            written: the tokens at the end of each prompt that belong to its completion, which continues; it may have
                rollout.max_new_tokens less these. None: completions begin.
            images: the images of each prompt; None: there are none.
        """
        ...


class Completer(NamedTuple):
    """A source of completions: the devices of the run, or a server.

    Attributes:
        prepare: (trained, frozen) -> the weights as `complete` needs them. Only this runs programs on the devices, if a
            server samples.
        complete: samples from these weights.
        close: ends its use; `complete` of another thread that still waits for a server raises CancelledError.
    """

    prepare: Callable[[Parameters, Parameters], Any]
    complete: Complete
    close: Callable[[], None] = lambda: None


def completer(config: Config, model: Model, tokenizer, run: Path) -> Completer:
    """Return the source of completions, the devices or rollout.server; run: the run folder."""
    if config.rollout.server is None:
        return complete_on_devices(config, model, tokenizer)
    return complete_by_server(config, model, tokenizer, run / "rollout_weights")


def complete_on_devices(config: Config, model: Model, tokenizer) -> Completer:
    """Sample completions on the devices of the run; each completion of a group has its own random numbers."""
    options, dtype = config.rollout, recipe_of(config.precision, model.linears).dtype
    generate = make_generate(model.graph, model.spec, **decode_options(config, dtype))
    ended = make_stop_test(stops_of(config, model, tokenizer), options.stop, tokenizer)
    size, reader = completions_at_once(config, jax.sharding.get_mesh()), open_images(model, config)

    def prepare(trained: Parameters, frozen: Parameters) -> Parameters:
        return decoding_weights(model, {**frozen, **trained}, dtype)

    def complete(
        weights: Parameters,
        prompts: list[list[int]],
        numbers: Sequence[int],
        written: Sequence[int] | None = None,
        images: Sequence[tuple[ImageRef, ...]] | None = None,
    ) -> list[Completion]:
        written, completions = written or [0] * len(prompts), []
        keeping = reader and KeepingReader.of(reader)
        for first in range(0, len(prompts), size):
            # Pad the last batch to the compiled size, by repeating the last prompt; its completions are dropped.
            rows = [min(row, len(prompts) - 1) for row in range(first, first + size)]
            there = [written[row] for row in rows]
            kept, limits = min(size, len(prompts) - first), [options.max_new_tokens - tokens for tokens in there]
            going = set(range(kept))
            seen = None
            if images is not None and keeping is not None and any(images[row] for row in rows):
                seen = PromptImages(keeping, [images[row] for row in rows])
            chosen = [prompts[row] for row in rows], [numbers[row] for row in rows]
            steps = generate(weights, *chosen, there, going, seen)
            lengths = [len(prompts[row]) for row in rows] if options.replay_routing else None
            how = {"scores": True, "limits": limits, "lengths": lengths, "going": going}
            completions += collect_completions(steps, kept, ended, **how)
        return completions

    return Completer(prepare, complete)


def decode_options(config: Config, dtype: jnp.dtype) -> dict[str, Any]:
    """The arguments of `make_generate` by which a run samples completions."""
    options = config.rollout
    sampling = Sampling(**{name: getattr(options, name) for name in Sampling._fields})
    how = {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": config.train.seed}
    return {**how, "dtype": dtype, "record_routing": options.replay_routing}


def completions_at_once(config: Config, mesh: jax.sharding.Mesh) -> int:
    """The number of completions that the devices of a mesh sample together."""
    of_step = config.train.micro_batch_size * config.train.grad_accum_steps * data_shards(mesh)
    return config.rollout.completions_at_once or of_step


def complete_by_server(config: Config, model: Model, tokenizer, folder: Path) -> Completer:
    """Get completions from OpenAI-compatible servers, after sending them the weights; only process 0 talks to them."""
    options = config.rollout
    servers = ServerPool((options.server or "").split(","))
    sent = SentWeights(config, model, folder, servers)
    sampling = {key: getattr(options, key) for key in Sampling._fields} | {"top_k": options.top_k or 0}
    ends = {"stop": stops_of(config, model, tokenizer), "strings": options.stop}
    how = {**sampling, **ends, "max_tokens": options.max_new_tokens, "seed": config.train.seed}
    how |= {"vocabulary": model.spec.vocabulary, "log_probs": options.corrects != "none"}
    how["routed"] = model.spec if options.replay_routing else None

    def complete(
        weights: WrittenWeights,
        prompts: list[list[int]],
        numbers: Sequence[int],
        written: Sequence[int] | None = None,
        images: Sequence[tuple[ImageRef, ...]] | None = None,
    ) -> list[Completion]:
        assert not images or not any(images), "`check_vision` refuses a server"
        is_main = multihost.is_main()
        served = sent.send(weights) if is_main else None
        table = np.zeros((len(prompts), 2 + options.max_new_tokens), np.int32)  # finished, length, tokens
        scores = np.zeros((len(prompts), options.max_new_tokens), np.float32)
        made = []
        if is_main:
            timeout = options.server_seconds
            made = completion_server.complete(servers, served, prompts, numbers, written, timeout=timeout, **how)
            for row, of_row, completion in zip(table, scores, made):
                row[:2] = completion.finished, len(completion.tokens)
                row[2 : 2 + len(completion.tokens)] = completion.tokens
                of_row[: len(completion.log_probs)] = completion.log_probs
        table, scores = multihost_utils.broadcast_one_to_all((table, scores))
        completions = [
            Completion(row[2 : 2 + row[1]].tolist(), bool(row[0]), of_row[: row[1]].tolist())
            for row, of_row in zip(table, scores)
        ]
        return _share_routing(model.spec, prompts, completions, made) if options.replay_routing else completions

    def close() -> None:
        servers.close()
        sent.close()

    return Completer(sent.write, complete, close)


def _share_routing(
    spec: ModelSpec, prompts: list[list[int]], completions: list[Completion], made: list[Completion]
) -> list[Completion]:
    """Return completions with the routed_experts of `made`, which only process 0 has."""
    ends = np.cumsum([len(prompt) + len(one.tokens) - 1 for prompt, one in zip(prompts, completions)])
    routed = np.zeros((ends[-1], *spec.routed_shape), np.int16)
    if multihost.is_main():
        routed = np.concatenate([one.routed_experts for one in made if one.routed_experts is not None])
    routed = np.asarray(multihost_utils.broadcast_one_to_all(routed), np.int16)
    return [one._replace(routed_experts=part) for one, part in zip(completions, np.split(routed, ends[:-1]))]


def stops_of(config: Config, model: Model, tokenizer) -> frozenset[int]:
    """The tokens that end a completion."""
    end = Prompts(tokenizer, config.chat).turn_end
    turn_end = frozenset() if end is None else frozenset({tokenizer.added_tokens_encoder[end]})
    return stop_tokens(model.folders.tokenizer, tokenizer) | turn_end
