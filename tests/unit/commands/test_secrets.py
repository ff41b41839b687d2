"""A secret in a URL is used, and it is neither shown nor saved nor sent."""

import dataclasses
import json
import logging

import pytest

from jaxtune import report
from jaxtune.checkpoint.storage import RemoteFolder, open_folder
from jaxtune.command import run_guarded
from jaxtune.config import from_json, to_json
from jaxtune.config.schema import CkptOptions, Config, DataOptions, Dataset
from jaxtune.data.cache.documents import folder_name
from jaxtune.data.reading import files
from jaxtune.data.reading.sources import SampleSource
from jaxtune.errors import UserError, hide_secrets
from jaxtune.host import process
from jaxtune.host.run_folder import RunFolder
from jaxtune.run import resume

SECRET = "s3cr3t"
URL = f"https://host/a.jsonl?download=true&token={SECRET}"


@pytest.mark.parametrize(
    "text, shown",
    [
        ("at https://h/a?token=s3cr3t: no", "at https://h/a?token=HIDDEN: no"),
        (
            "https://h/a?raw=1&X-Amz-Signature=s3cr3t%2F&sig=s3cr3t",
            "https://h/a?raw=1&X-Amz-Signature=HIDDEN&sig=HIDDEN",
        ),
        ("(https://h/a?s3cr3t)", "(https://h/a?HIDDEN)"),
        ("https://h/a#key=s3cr3t", "https://h/a#key=HIDDEN"),
        ("'ftp://me:s3cr3t@h/a', b@c", "'ftp://me:HIDDEN@h/a', b@c"),
        ("https://me:s3c@r3t@h/a", "https://me:HIDDEN@h/a"),
        ("https://s3cr3t@github.com/a", "https://HIDDEN@github.com/a"),
        ("simplecache::https://me:s3cr3t@h", "simplecache::https://me:HIDDEN@h"),
        ("HTTPS://h?a=s3cr3t and s3://b/c?d=s3cr3t", "HTTPS://h?a=HIDDEN and s3://b/c?d=HIDDEN"),
        ("abfs://container@account.dfs.core.windows.net/a", "abfs://container@account.dfs.core.windows.net/a"),
        ("s3://bucket/what?.jsonl", "s3://bucket/what?.jsonl"),
        ("https://h/a?download=true&version=3, then", "https://h/a?download=true&version=3, then"),
        ("a?b=c user:word@h", "a?b=c user:word@h"),
    ],
)
def test_what_is_hidden_of_a_url(text, shown):
    assert hide_secrets(text) == shown and hide_secrets(shown) == shown
    assert str(UserError(text)) == shown


def config_of(url: str) -> Config:
    return Config(data=DataOptions(datasets=(Dataset(path=url),)), ckpt=CkptOptions(mirror=url))


def test_it_is_in_no_file_log_message_or_report_of_a_run(tmp_path, monkeypatch, capsys):
    for logger in map(logging.getLogger, process._SHOWN):
        for attribute in ("handlers", "propagate", "level"):  # reset after the test
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))
    config, folder = config_of(URL), RunFolder(tmp_path)
    folder.write_records(config, None)
    folder.metrics.write_text('{"step": 1, "loss": 1.0}\n')
    process._show_log(config.log)
    with process.log_to_file(config, tmp_path):
        logging.getLogger("jaxtune").warning("mirror: %s", URL)
    assert report.main([str(tmp_path)]) == 0
    shown = f"{config} {dataclasses.replace(config, notes=(URL,)).startup_notes} {capsys.readouterr()}"
    written = [file.read_text() for file in tmp_path.iterdir() if file.is_file()]
    assert len(written) == 4 and not any(SECRET in text for text in (shown, *written))
    assert "token=HIDDEN" in folder.config.read_text() and "token=HIDDEN" in (tmp_path / "run.log").read_text()

    def failing():
        raise FileNotFoundError(2, "No such file", URL)

    assert run_guarded(failing) == 2 and "token=HIDDEN: No such file" in capsys.readouterr().err


def test_another_token_is_the_same_run_and_the_same_data(tmp_path):
    before, now = config_of(URL), config_of(URL.replace(SECRET, "another"))
    for saved in (to_json(before), to_json(before).replace("HIDDEN", SECRET)):  # the second as a run once saved it
        resume.check_unchanged(json.loads(saved), now, RunFolder(tmp_path))
    with pytest.raises(UserError, match="data.datasets"):
        resume.check_unchanged(json.loads(to_json(before)), config_of("https://host/b.jsonl"), RunFolder(tmp_path))
    source = SampleSource("a", "1", lambda: "1", lambda report: iter(()))
    names = {folder_name(source, config.data.datasets[0], "") for config in (before, now)}
    assert len(names) == 1


def test_a_resumed_run_says_that_the_secret_is_to_be_given_again():
    config = from_json(to_json(config_of(URL)))
    with pytest.raises(UserError, match=r"^data: https://host/a.jsonl\?.*token=HIDDEN: a run's files do not keep this"):
        files.find(config.data.datasets[0].path or "")
    with pytest.raises(UserError, match=r"^ckpt.mirror: https://.*HIDDEN: a run's files do not keep this secret; give"):
        open_folder(config.ckpt.mirror or "", "ckpt.mirror")


def test_it_is_used_where_it_is_needed(monkeypatch):
    opened = []
    monkeypatch.setattr(RemoteFolder, "write", lambda folder, *_: opened.append(folder.root))
    monkeypatch.setattr(RemoteFolder, "remove", lambda *_: None)
    assert open_folder(URL, "ckpt.mirror").url == URL.replace(SECRET, "HIDDEN") and opened == [URL]
    file = files.File(URL, True, lambda: None, lambda: None)  # type: ignore[arg-type, return-value]
    assert file.location == URL and file.name == URL.replace(SECRET, "HIDDEN") and file.kind == ".jsonl"
