"""Every optimizer has a colour of its own, for colour-blind readers and for dark pages, too."""

import itertools

from matplotlib.colors import to_rgb
import numpy as np
import pytest

from benchmarks.harness.colours import COLOURS, INK
from benchmarks.tuned.arms import ARMS

# What is left of linear RGB without the cones for green or for red (Machado et al., 2009).
SEEN = {
    "all cones": np.eye(3),
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
}
TO_XYZ = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]])


def lab(colour, eye):
    """The colour in CIELAB, where the distance says how different two colours look."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(SEEN[eye] @ linear, 0, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("eye", SEEN)
def test_any_two_can_be_told_apart(eye):
    """Two is the least difference that one sees at all, side by side."""
    for one, other in itertools.combinations(COLOURS.items(), 2):
        assert np.linalg.norm(lab(one[1], eye) - lab(other[1], eye)) > 13, (one, other)


@pytest.mark.parametrize("page", ["#ffffff", "#131416"])
@pytest.mark.parametrize("colour", [INK, *COLOURS.values()])
def test_is_seen_on_light_and_dark_pages(colour, page):
    assert abs(lab(colour, "all cones")[0] - lab(page, "all cones")[0]) > 25


def test_every_arm_has_a_colour():
    assert {*ARMS} <= set(COLOURS)
