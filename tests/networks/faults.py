"""What is wrong with how an optimizer moves an array of a network."""

import math

from optax_largebatch.diagnostics.explain import UNKNOWN
from tests.networks.network import AXES_OF_LAYERS, WITH_MUON


def faults(optimizer, leaf, moved):
    """What is wrong, one line each.

    What is a matter of taste is not wrong: a trust ratio for a vector, an embedding or a head that
    Muon moves if nobody asked for the recipe, fused matrices that Muon takes for one, and a matrix
    of zeros that Adam moves beside matrices on spheres.

    Args:
        optimizer: its name.
        leaf: the array.
        moved: what `explain` says of it.
    """
    wrong = [] if moved.direction != UNKNOWN else ["not seen by the optimizer"]
    wrong += _faults_of_blocks(leaf, moved)
    if optimizer in WITH_MUON:
        wrong += _faults_of_matrices(optimizer, leaf, moved)
    if moved.length == "sphere":
        # A matrix that starts at zero leaves it there: tests/optimizers/test_zeros.py.
        wrong += ["a vector is on a sphere"] * (leaf.is_vector and not moved.matrices)
    elif optimizer == "adamh" and _must_be_moved_as_a_matrix(optimizer, leaf):
        wrong.append("a matrix is left to Adam")
    return wrong


def _faults_of_blocks(leaf, moved):
    """Each layer of a stack needs a norm of its own, and nothing else is cut."""
    if moved.length not in ("trust ratio", "sphere"):
        return []
    if moved.blocks % leaf.layers:
        return ["a stack has one norm" if moved.blocks < leaf.layers else "an array is cut"]
    is_cut = leaf.layers == 1 and moved.blocks > 1 and not moved.matrices
    return ["an array is cut"] if is_cut else []


def _faults_of_matrices(optimizer, leaf, moved):
    """Whether Muon moves it, and as which matrices."""
    if not moved.matrices:
        left = _must_be_moved_as_a_matrix(optimizer, leaf) and moved.direction != UNKNOWN
        what = "a convolution" if leaf.kind == "conv" else "a matrix"
        return [f"{what} is left to Adam"] if left else []
    if leaf.is_vector or leaf.kind == "depthwise" or leaf.complex_pair:
        return [f"taken for a matrix: {leaf.kind}"]
    if optimizer == "planned_optimizer" and not leaf.is_matrix:
        return [f"moved by Muon: {leaf.kind}"]
    if leaf.kind == "token":
        return []
    return _faults_of_sides(optimizer, leaf, moved)


def _must_be_moved_as_a_matrix(optimizer, leaf):
    """Whether Adam's steps are wrong; a matrix that starts at zero is often a last layer."""
    may_be_left = leaf.init == "zeros" and optimizer != "muon"
    return leaf.is_matrix and not leaf.stem and not may_be_left


def _faults_of_sides(optimizer, leaf, moved):
    """Whether the matrices that Muon moves are those of the network."""
    number = sum(moved.matrices.values())
    size = sum(rows * columns * count for (rows, columns), count in moved.matrices.items())
    if number % leaf.layers or size != math.prod(leaf.shape):
        return ["a stack is one matrix" if number < leaf.layers else "a matrix is cut"]
    if not leaf.is_matrix:
        return []
    right = _sides(leaf)
    wrong = []
    for rows, columns in moved.matrices:
        if _fits((rows, columns), right, leaf.fused):
            continue
        if not _fits((columns, rows), right, leaf.fused):
            wrong.append("other axes are rows and columns")
        elif optimizer == "muon" and rows != columns:  # its steps depend on rows over columns
            wrong.append("rows and columns are swapped")
    return wrong


def _fits(sides, right, fused):
    """Whether a matrix is one of the right ones, or of those that are fused in one."""
    rows, columns = sides
    if sides in right or not fused:
        return sides in right
    return any(
        rows == right_rows or (columns == right_columns and right_rows % rows == 0)
        for right_rows, right_columns in right
    )


def _sides(leaf):
    """The rows and columns that a matrix of an array may have."""
    sides = {(1, 1)}
    for length, axis in zip(leaf.shape, leaf.axes, strict=True):
        if axis in AXES_OF_LAYERS:
            continue
        longer = {(rows * length, columns) for rows, columns in sides}
        wider = {(rows, columns * length) for rows, columns in sides}
        sides = {
            "rows": longer,
            "columns": wider,
            "row_heads": sides | longer,
            "column_heads": sides | wider,
        }.get(axis, sides | longer | wider)
    return sides
