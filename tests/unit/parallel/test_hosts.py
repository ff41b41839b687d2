"""Hosts are counted by name: a host may have a process for each GPU."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxtune.parallel import multihost


@pytest.mark.parametrize(
    ("names", "hosts"), [(["a", "a", "b", "b"], 2), (["a", "a", "a", "a"], 1), (["a", "b", "c", "d"], 4)]
)
def test_hosts_are_counted_by_name(names, hosts, monkeypatch):
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=process) for process in range(4)]))
    assert multihost.count_hosts(mesh) == 4  # only compiled for them
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(multihost, "host_names", lambda: names)
    assert multihost.count_hosts(mesh) == hosts
