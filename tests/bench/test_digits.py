"""What the bench of the digits does to a picture before it counts."""

import torch
from torch.testing import assert_close

from tests.bench.digits import hidden, turned_round


def test_the_quarter_that_ranks_highest_is_blank_and_the_rest_stays():
    images = torch.rand(3, 1, 8, 8) + 0.1
    ranks = torch.tensor([[0.0, 1, 2, 3], [9, 1, 2, 3], [0, 1, 5, 3]])
    blank = hidden(images, 4, ranks)
    corners = [(4, 4), (0, 0), (4, 0)]
    for image, before, (top, left) in zip(blank, images, corners, strict=True):
        assert (image[0, top : top + 4, left : left + 4] == 0).all()
        assert int((image != before).sum()) == 16
    assert int((hidden(images, 2, torch.rand(3, 16)) == 0).sum()) == 3 * 4 * 4


def test_turned_round_every_patch_changes_its_place():
    images = torch.rand(2, 1, 8, 8)
    turned = turned_round(images, 4)
    assert_close(turned[..., :4, :4], images[..., 4:, 4:])
    assert_close(turned[..., :4, 4:], images[..., 4:, :4])
