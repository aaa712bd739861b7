"""Real networks: each array is moved as its author would have it, or a message says what to do."""

import pytest

from tests.conftest import slow_but
from tests.networks.network import NAMES, OPTIMIZERS, Network
from tests.networks.verdicts import trial, verdict

LARGE = {"controlnet_diffusers", "unet_diffusers", "unet_linen"}
"""Networks of hundreds of arrays, no two of which are alike."""


@pytest.fixture(scope="module", params=slow_but({*NAMES} - LARGE, NAMES))
def network(request):
    return Network(request.param)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_right_or_says_what_to_write(network, optimizer):
    result = verdict(network, optimizer)
    assert result.is_good, f"{result.kind}: {result.why}"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_is_right_with_all_that_its_author_knows(network, optimizer):
    result = trial(network, optimizer, network.arguments(optimizer))
    assert result.is_right, str(result)
    assert not result.messages
