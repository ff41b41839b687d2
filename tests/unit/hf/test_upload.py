"""Uploads to a local hub: the files that arrive, and the messages before an upload and after one that fails."""

import pytest
from hub_server import HubServer

from jaxtune.errors import UserError
from jaxtune.hf import check_upload, upload


@pytest.fixture
def hub(monkeypatch):
    """Start a hub and set a token with write access in the environment."""
    with HubServer() as server:
        server.use_as_hub(monkeypatch)
        yield server


@pytest.fixture
def model(tmp_path):
    """Write an exported model in two shards."""
    folder = tmp_path / "model"
    folder.mkdir()
    names = ("config.json", "README.md", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for number, name in enumerate(names):
        (folder / name).write_bytes(name.encode() * (number + 1))
    return folder


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_file_arrives_and_older_weights_go(hub, model):
    check_upload("ada/mine", True, "--push_to_hub")
    assert upload(model, "ada/mine", private=True) == f"{hub.url}/ada/mine"
    assert hub.repos == {"ada/mine": files(model)} and hub.private == {"ada/mine"}
    hub.repos["ada/mine"]["notes.txt"] = b"of its owner"
    for shard in model.glob("*.safetensors"):
        shard.unlink()
    (model / "model.safetensors").write_bytes(b"all in one")
    check_upload("mine", True, "--push_to_hub")  # in the user's own namespace
    upload(model, "mine", private=True)
    assert hub.repos == {"ada/mine": {**files(model), "notes.txt": b"of its owner"}}


def test_an_adapter_leaves_the_weights_beside_it(hub, model):
    upload(model, "ada/mine")
    for file in model.iterdir():
        file.unlink()
    (model / "adapter_model.safetensors").write_bytes(b"small")
    upload(model, "ada/mine")
    assert {"adapter_model.safetensors", "model-00001-of-00002.safetensors"} <= hub.repos["ada/mine"].keys()
    assert not hub.private


def test_what_cannot_be_uploaded_is_said_before_it_is_made(hub, model, monkeypatch):
    def refused(repo="ada/mine", private=False):
        with pytest.raises(UserError) as caught:
            check_upload(repo, private, "--push_to_hub")
        assert hub.token not in str(caught.value)
        return str(caught.value)

    assert "--push_to_hub=a b/c: Repo id must use alphanumeric chars" in refused("a b/c")
    hub.role = "read"
    assert "the token of ada may only read; run `hf auth login`" in refused()
    hub.role = "write"
    assert "the token is of ada, and may not write to eve; run `hf auth login`" in refused("eve/mine")
    upload(model, "ada/public")
    assert "the repository exists and is public" in refused("ada/public", private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "token" in (why := refused()) and "run `hf auth login`" in why and "hf_wrong" not in why
    monkeypatch.delenv("HF_TOKEN")
    assert "the hub needs a token for uploads; run `hf auth login`" in refused()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert "http://127.0.0.1:9 cannot be reached" in refused()
    assert hub.repos.keys() == {"ada/public"}


def test_after_a_failure_the_folder_is_whole_and_the_command_is_said(hub, model):
    hub.broken, before = True, files(model)
    with pytest.raises(UserError) as caught:
        upload(model, "ada/mine", private=True)
    assert f"The folder is complete; upload it with: hf upload ada/mine {model} . --private" in str(caught.value)
    assert "the disk of the hub is full" in str(caught.value)
    assert hub.token not in str(caught.value)
    assert files(model) == before and hub.repos == {"ada/mine": {}}
