"""What rules select, and trees of shapes."""

import jax


def selected(rule, params):
    """The names that a rule selects."""
    leaves = jax.tree_util.tree_leaves_with_path(rule.mask(params))
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, flag in leaves if flag}


def shapes(tree):
    """The tree with shapes in the place of tuples."""
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
        tree,
        is_leaf=lambda node: isinstance(node, tuple),
    )
