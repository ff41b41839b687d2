"""Weights that a run writes for its servers: each version has a folder while it is needed."""

import gc
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest

from jaxtune.rollout import sent_weights
from jaxtune.rollout.sent_weights import SentWeights
from jaxtune.rollout.server_pool import ServerPool


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes SentWeights for a folder, with a stub in place of the export."""

    def export(model, parameters, config, folder):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(sent_weights, "export_weights", export)
    config = SimpleNamespace(
        lora=SimpleNamespace(enabled=False),
        train=SimpleNamespace(run_name="one"),
        rollout=SimpleNamespace(server_seconds=1),
    )
    return lambda: SentWeights(config, None, tmp_path / "weights", ServerPool(["http://localhost:1"]))  # pyright: ignore


def folders(tmp_path):
    return sorted(path.name for path in (tmp_path / "weights").glob("*"))


def test_a_version_is_removed_when_nothing_refers_to_it(make, tmp_path, monkeypatch):
    monkeypatch.setattr(sent_weights.server_weights, "send_weights", lambda url, folder, timeout: None)
    sent = make()
    for step in range(3):
        sent.send(sent.write({}, {}))
        gc.collect()
        assert folders(tmp_path) == [str(step)]
    sent.close()
    assert not folders(tmp_path)


def test_the_end_of_a_run_leaves_files_that_a_server_reads(make, tmp_path, monkeypatch):
    """vLLM ends if its files disappear. The next start of the run removes them."""
    reads, may_end = threading.Event(), threading.Event()

    def send(url, folder, timeout):
        reads.set()
        assert may_end.wait(20)

    monkeypatch.setattr(sent_weights.server_weights, "send_weights", send)
    sent = make()
    written = sent.write({}, {})
    thread = threading.Thread(target=sent.send, args=[written])
    thread.start()
    assert reads.wait(20)
    sent.close()
    assert folders(tmp_path) == ["0"]
    may_end.set()
    thread.join()
    with pytest.raises(CancelledError):
        sent.send(written)
    make()
    assert not folders(tmp_path)


def test_weights_of_an_ended_run_do_not_remove_those_of_the_next(make, tmp_path):
    """Both have the same names, and a traceback may keep the older ones alive."""
    first = make()
    kept = first.write({}, {})
    first.close()
    second = make()
    written = second.write({}, {})
    del kept
    gc.collect()
    assert folders(tmp_path) == ["0"] and written.folder.is_dir()
