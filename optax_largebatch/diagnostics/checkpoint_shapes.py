"""The shapes of the arrays in a checkpoint, for `explain`."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checkpoint_shapes(path: Path, under: str | None = None) -> Any:
    """A tree of shapes.

    Args:
        path: a folder that `orbax.checkpoint.StandardCheckpointer` has saved, an `.npz` file, or
            a `.json` file of names, or nested objects, and shapes, as in
            `{"dense": {"kernel": [3, 4], "bias": [4]}}`.
        under: the part of the tree that is meant, as in `state/params`; None for all of it.

    Returns:
        A tree of `jax.ShapeDtypeStruct`.

    Raises:
        ImportError: it is a folder, and Orbax is not installed.
        OSError: it cannot be read.
        ValueError: it is none of these, or has no such part.
    """
    if path.is_dir():
        tree = _of_orbax(path)
    elif path.suffix == ".npz":
        with np.load(path) as file:
            tree = {name: _shape(file[name].shape) for name in file.files}
    elif path.suffix == ".json":
        tree = _of_json(json.loads(path.read_text()))
    else:
        raise ValueError(
            f"checkpoint must be a folder of Orbax, an .npz or a .json file, got {str(path)!r}."
        )
    for name in [] if under is None else under.split("/"):
        if not isinstance(tree, dict) or name not in tree:
            known = ", ".join(map(repr, tree)) if isinstance(tree, dict) else "no names"
            raise ValueError(
                f"under must name a part of the checkpoint: {name!r} is not in {known}."
            )
        tree = tree[name]
    return tree


def _of_orbax(path: Path) -> Any:
    try:
        from orbax.checkpoint import StandardCheckpointer
    except ImportError:
        raise ImportError(
            "a folder is read with Orbax, which is not installed: pip install orbax-checkpoint"
        ) from None
    with StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path.absolute()).item_metadata
    if saved is None:
        raise ValueError(f"checkpoint must be a folder that Orbax has saved, got {str(path)!r}.")
    return jax.tree.map(lambda leaf: _shape(leaf.shape), saved.tree)


def _of_json(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _of_json(value) for name, value in node.items()}
    if isinstance(node, list) and all(type(size) is int and size >= 0 for size in node):
        return _shape(node)
    raise ValueError(f'checkpoint must hold shapes, as in {{"bias": [4]}}; it holds {node!r}.')


def _shape(shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
