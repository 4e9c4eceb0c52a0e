"""The settings under which a card repeats itself. That it does is for `make test-gpu`."""

from __future__ import annotations

import os

import pytest
import torch

from moe_rl.errors import ConfigError
from moe_rl.models.load import make_deterministic

KINDS = ("flash", "mem_efficient", "cudnn")


@pytest.fixture
def put_back(monkeypatch):
    """Leaves torch as it was."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    allowed = {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in KINDS}
    yield
    torch.use_deterministic_algorithms(False)
    for kind, was in allowed.items():
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(was)


def test_it_asks_for_what_repeats_itself(put_back):
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert not any(getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in KINDS)


def test_too_late_is_an_error_and_a_workspace_of_the_users_is_kept(put_back, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="Call make_deterministic\\(\\) first"):
        make_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
