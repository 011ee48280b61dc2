"""ring.py: real processes that pass keys and values on find what one process finds, and always end."""

import subprocess

import pytest
import torch

from mha_lessons import ring
from mha_lessons.flash import flash_attention
from mha_lessons.ring import ring_attention, why_unavailable
from tests.agree import assert_agree, randn

needs_gloo = pytest.mark.skipif(why_unavailable() is not None, reason=f"a ring cannot run here: {why_unavailable()}")


@pytest.fixture
def processes(monkeypatch):
    """All processes that the ring starts; each must have ended when the test has."""
    started = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(ring.subprocess, "Popen", Noted)
    yield started
    assert started
    assert all(process.returncode is not None for process in started)


def qkv():
    return randn(2, 3, 10, 4, seed=0), randn(2, 3, 13, 4, seed=1), randn(2, 3, 13, 5, seed=2)


@needs_gloo
@pytest.mark.parametrize(("workers", "keys_held"), [(1, [13]), (2, [7, 7]), (4, [4, 4, 4, 4])])
def test_the_ring_finds_what_one_process_finds(workers, keys_held, processes):
    """With ragged parts: 10 queries and 13 keys."""
    q, k, v = qkv()
    result = ring_attention(q, k, v, workers=workers, scale=0.7)
    out, lse = flash_attention(q, k, v, scale=0.7, return_lse=True)
    assert_agree(result.out, out)
    assert_agree(result.lse, lse)
    assert result.keys_held == keys_held
    assert len(processes) == workers


@needs_gloo
def test_a_worker_that_fails_ends_the_ring_and_is_quoted(processes):
    with pytest.raises(RuntimeError, match=r"(?s)worker \d ended with 1.*TypeError"):
        ring_attention(*qkv(), scale="large")


@needs_gloo
def test_the_time_is_bounded(processes):
    with pytest.raises(TimeoutError, match=r"0\.2 s"):
        ring_attention(*qkv(), timeout=0.2)


@needs_gloo
def test_a_worker_that_is_killed_ends_the_ring(processes, monkeypatch):
    wait = ring.time.sleep
    monkeypatch.setattr(ring.time, "sleep", lambda seconds: (wait(seconds), processes[1].kill()))
    with pytest.raises(RuntimeError, match="worker 1 ended"):
        ring_attention(*qkv(), timeout=10)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"workers": 0}, ValueError, "workers is 0"),
        ({"workers": 2.0}, TypeError, "workers"),
        ({"workers": 11}, ValueError, "10 queries and 13 keys"),
        ({"timeout": 0}, ValueError, "timeout is 0"),
        ({"k": torch.zeros(2, 3, 13, 5).double()}, ValueError, "k has shape"),
    ],
)
def test_refuses(changed, error, says):
    arguments = dict(zip("qkv", qkv(), strict=True)) | changed
    with pytest.raises(error, match=says):
        ring_attention(**arguments)


def test_where_there_is_no_gloo_it_says_so(monkeypatch):
    monkeypatch.setattr(ring.dist, "is_gloo_available", lambda: False)
    assert "gloo" in why_unavailable()
    with pytest.raises(RuntimeError, match="gloo"):
        ring_attention(*qkv())
