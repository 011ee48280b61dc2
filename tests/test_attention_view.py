"""What AttentionView tells the browser: bytes, labels, masks, clamped choices, and nothing at all on an error."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from mha_lessons.attention_view import AttentionView

H, I, J = 3, 4, 5  # noqa: E741 - the axes' names in the glossary


def dirichlet(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), size=shape[:-1])


@pytest.fixture
def view() -> AttentionView:
    return AttentionView(dirichlet(H, I, J), list("abcd"), list("vwxyz"))


def record(view: AttentionView, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names in each state message that the view sends from now on."""
    sent = []
    monkeypatch.setattr(view, "send_state", lambda key=None: sent.append({key} if isinstance(key, str) else set(key)))
    return sent


def test_bytes_are_little_endian_float32_with_the_last_key_fastest(view):
    weights = dirichlet(H, I, J)
    assert view._shape == [1, H, I, J]
    sent = np.frombuffer(view._weights, dtype="<f4")
    np.testing.assert_array_equal(sent.reshape(H, I, J), weights.astype(np.float32))
    assert sent[1] == np.float32(weights[0, 0, 1])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ">f8"])
def test_memory_order_and_dtype_of_the_argument_do_not_matter(order, dtype):
    weights = np.asarray(dirichlet(H, I, J), dtype=dtype, order=order)
    np.testing.assert_array_equal(AttentionView(weights).weights[0], weights.astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_takes_tensors_that_want_gradients(dtype):
    weights = torch.tensor(dirichlet(H, I, J), dtype=dtype, requires_grad=True)
    hidden = torch.ones(I, J, dtype=torch.bool).triu(2)
    view = AttentionView(weights, hidden=hidden)
    np.testing.assert_array_equal(view.weights[0], weights.detach().float().numpy())
    assert sum(view._hidden) == H * int(hidden.sum())


def test_import_brings_no_torch():
    code = "import sys, mha_lessons.attention_view; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_labels_are_numbers_by_default_and_text_always(view):
    assert (view.query_tokens, view.key_tokens) == (list("abcd"), list("vwxyz"))
    assert view.head_names == ["head 0", "head 1", "head 2"]
    plain = AttentionView(dirichlet(H, I, J), keys=range(J), head_names=["x", "y", "z"])
    assert (plain.query_tokens, plain.key_tokens) == (["0", "1", "2", "3"], ["0", "1", "2", "3", "4"])
    assert plain.head_names == ["x", "y", "z"]


@pytest.mark.parametrize("shape", [(J,), (I, 1), (1, J), (I, J), (H, 1, 1), (H, I, J)])
def test_hidden_broadcasts_to_heads_queries_keys(shape):
    hidden = np.random.default_rng(0).random(shape) < 0.5
    view = AttentionView(dirichlet(H, I, J), hidden=hidden)
    sent = np.frombuffer(view._hidden, dtype=np.uint8).reshape(H, I, J)
    np.testing.assert_array_equal(sent, np.broadcast_to(hidden, (H, I, J)))


def test_show_replaces_everything_in_one_message(view, monkeypatch):
    view.head, view.query, view.key = 2, 3, 4
    sent = record(view, monkeypatch)
    view.show(dirichlet(6, 2, 2, 3, seed=1), ["p", "q"], ["r", "s", "t"], hidden=np.eye(2, 3, dtype=bool))
    assert len(sent) == 1
    assert sent[0] == {
        *("_shape", "_weights", "_hidden", "query_tokens", "key_tokens", "head_names", "head", "query", "key")
    }
    assert view._shape == [6, 2, 2, 3]
    assert (view.frame, view.head, view.query, view.key) == (0, 1, 1, 2)
    view.show(dirichlet(H, I, J))
    assert view._hidden == b""
    assert view.query_tokens == ["0", "1", "2", "3"]
    assert (view.head, view.query, view.key) == (1, 1, 2)


def test_frames_and_choices_are_clamped():
    view = AttentionView(dirichlet(6, H, I, J))
    for name, size in [("frame", 6), ("head", H), ("query", I), ("key", J)]:
        setattr(view, name, 99)
        assert getattr(view, name) == size - 1
        setattr(view, name, -1)
        assert getattr(view, name) == 0


def test_a_choice_can_be_observed(view):
    seen = []
    view.observe(lambda change: seen.append((change.name, change.new)), names=["head", "query", "key", "enlarged"])
    view.key, view.head, view.enlarged = 3, 1, True
    assert seen == [("key", 3), ("head", 1), ("enlarged", True)]


BROKEN = dirichlet(H, I, J)
BROKEN[1, 2, 3] = np.nan


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weights": dirichlet(I, J)}, ValueError, r"shape \(4, 5\), 2 axes; expected 3 \(h i j\) or 4"),
        ({"weights": np.ones((1, 1, 2, 3, 4))}, ValueError, "5 axes"),
        ({"weights": np.ones((2, 0, 3))}, ValueError, r"shape \(2, 0, 3\); every axis"),
        ({"weights": BROKEN}, ValueError, "NaN or infinite values, 1 of 60"),
        ({"weights": np.full((1, 1, 1), 1e300)}, ValueError, "infinite values, 1 of 1"),
        ({"weights": -dirichlet(H, I, J)}, ValueError, "negative values.*softmax first"),
        ({"queries": ["a"]}, ValueError, "queries has 1 label; weights needs 4"),
        ({"keys": list("abcd")}, ValueError, "keys has 4 labels; weights needs 5"),
        ({"head_names": ["a"]}, ValueError, "head_names has 1 label; weights needs 3"),
        ({"hidden": np.zeros((J, I), bool)}, ValueError, r"hidden has shape \(5, 4\).*\(h i j\) = \(3, 4, 5\)"),
        ({"hidden": np.zeros((1, H, I, J), bool)}, ValueError, "hidden has shape"),
        ({"hidden": np.zeros((I, J))}, TypeError, "dtype float64; expected bool, True = hidden"),
    ],
)
def test_errors_say_what_came_and_change_nothing(view, monkeypatch, arguments, error, words):
    before = view.get_state()
    sent = record(view, monkeypatch)
    with pytest.raises(error, match=words):
        view.show(**{"weights": dirichlet(H, I, J, seed=1)} | arguments)
    assert view.get_state() == before
    assert sent == []
    with pytest.raises(error, match=words):
        AttentionView(**{"weights": dirichlet(H, I, J)} | arguments)


def test_repr_is_one_short_line_of_numbers():
    weights = np.full((4, 6, 6), 0.5)
    weights[2, 3, 4] = 0.83
    assert repr(AttentionView(weights)) == "AttentionView(4 heads, 6 queries x 6 keys, largest weight 0.83)"
    one = AttentionView(np.ones((2, 1, 1, 1)), hidden=np.array([True]))
    assert repr(one) == "AttentionView(2 frames, 1 head, 1 query x 1 key, 1 hidden, largest weight 1.00)"
    assert repr(AttentionView(-np.zeros((1, 2, 2)))).endswith("largest weight 0.00)")
    many = AttentionView(np.ones((100, 16, 128, 128), dtype=np.float32), hidden=np.array([True]))
    assert len(repr(many)) <= 110
