"""What a parameter is, by its shape and its name."""

from collections.abc import Sequence
import re

from optax_largebatch.norms import lengths_along, other_axes
from optax_largebatch.params.names import is_called

WINDOW = 32
"""The most that the window of a convolution is long along one axis."""
COLOURS = 4
"""The most channels of an image: a convolution with so few inputs is a first layer."""

Shape = tuple[int, ...]
"""The lengths of the axes of an array."""

Axes = tuple[int, ...]
"""Some of the axes of an array."""

Pair = tuple[Axes, Axes]
"""The axes of rows, and those of columns."""


def is_vector(name: str, block: Sequence[int]) -> bool:
    """Whether a block has one axis, or is called a bias, a scale or a filter and has several.

    Lengths do not count: inside of `jax.shard_map`, they are those of a shard.

    Args:
        name: of the parameter.
        block: its shape without the stacked axes.
    """
    kind = "depthwise" if len(block) == 2 else "norm of an image"
    return len(block) < 2 or is_called("vector", name) or is_called(kind, name)


def pair_of_attention(name: str, ndim: int) -> Pair | None:
    """The rows and columns of a kernel of Flax's, Keras' or MaxText's attention, by its name.

    They have three axes: (inputs, heads, size) for queries, keys and values, and (heads, size,
    outputs) for the last one. All heads are one matrix.

    Args:
        name: of the parameter.
        ndim: the number of axes of a block.
    """
    if ndim == 3 and is_called("attention to heads", name):
        return (0,), (1, 2)
    if ndim == 3 and is_called("attention from heads", name):
        return (0, 1), (2,)
    return None


def pair_of_kernel(name: str, block: Sequence[int], width: int) -> Pair | None:
    """The rows and columns of a kernel with more than two axes; None for what is no matrix.

    A depthwise kernel is a filter for each channel, an array that ends with an axis of length 2 is
    complex (but the window of a weight may end it), and embeddings and positions are tables.

    Args:
        name: of the parameter.
        block: its shape without the stacked axes.
        width: of the network, the length that most parameters have.
    """
    axes = tuple(range(len(block)))
    first = axes[:1]
    last = axes[-1:]
    inner = axes[1:]
    outer = axes[:-1]
    has_first_width = block[0] == width
    has_last_width = block[-1] == width
    is_kernel = re.search(r"(kernel|weight|(^|/)w)$", name, re.IGNORECASE) is not None
    is_bias = block[0] == 1 and len(block) == 3 and not is_kernel
    is_flat = len(block) - block.count(1) < 2
    is_complex = block[-1] == 2 and not is_called("outputs first", name)
    if is_flat or is_bias or is_complex or block[-1] == 1 or is_table(name):
        return None
    if is_called("heads of inputs", name):
        is_turned = has_last_width and not has_first_width
        return (last, outer) if is_turned else (first, inner)
    if is_called("heads to outputs", name):
        is_turned = has_first_width and not has_last_width
        return (inner, first) if is_turned else (outer, last)
    window = window_of(name, block)
    if window:
        channels = other_axes(len(block), window)
        inputs, outputs = reversed(channels) if window == axes[2:] else channels
        if block[inputs] == 1:
            return None
        return tuple(sorted((*window, inputs))), (outputs,)
    if has_first_width and width not in block[-2:]:
        return first, inner
    return axes[-2:-1], last


def window_of(name: str, block: Sequence[int]) -> Axes:
    """The axes of the window of a convolution; none for other kernels.

    They are the first ones in Flax, Haiku and Keras, and the last ones in Equinox and PyTorch.
    """
    axes = tuple(range(len(block)))
    may_be_last = max(block[2:], default=0) <= WINDOW
    may_be_first = max(block[:-2], default=0) <= WINDOW
    window: Axes = ()
    if may_be_last and (not may_be_first or is_called("outputs first", name)):
        window = axes[2:]
    elif may_be_first:
        window = axes[:-2]
    is_square = len(window) > 1 and len({*lengths_along(block, window)}) == 1
    is_window = is_square and not is_called("stack of matrices", name)
    return window if is_window or is_called("convolution", name) else ()


def is_first_layer(
    name: str,
    block: Sequence[int],
    is_alone: bool,
) -> bool:
    """Whether a convolution sees the channels of an image.

    The only one of a network sees other channels than those inside, as the patches of latents.
    """
    window = window_of(name, block)
    channels = lengths_along(block, other_axes(len(block), window))
    return min(channels) <= COLOURS or (is_alone and min(channels) < max(channels))


def is_table(name: str) -> bool:
    """Whether an array itself, and not what it is in, is called an embedding or a position."""
    module = re.sub(r"/(kernel|weight[^/]*|w)$", "", name).rpartition("/")[2]
    return any(is_called(kind, module) for kind in ("embedding", "position", "token"))
