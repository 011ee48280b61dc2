"""What every test stands on: fixed seeds, and figures that need no screen."""

import random

import hypothesis
import matplotlib
import numpy as np
import pytest
import torch

matplotlib.use("Agg")

# The same examples in every run and on every machine; a busy machine is no failure.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def seeds():
    """No test depends on the tests that ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
