"""The shapes of the arrays in a checkpoint, for `explain`."""

import json
from pathlib import Path
import reprlib
from typing import IO, Any
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

MOST_BYTES_OF_JSON = 64 * 2**20
"""The size limit for a file of shapes; a larger file holds something else and fills the memory."""

DEEPEST = 100
"""A limit above the depth of any network and below Python's limit for recursion."""


def checkpoint_shapes(path: Path, under: str | None = None) -> Any:
    """A tree of shapes.

    Args:
        path: a folder that `orbax.checkpoint.StandardCheckpointer` has saved, an `.npz` file, or
            a `.json` file of names, or nested objects, and shapes, as in
            `{"dense": {"kernel": [3, 4], "bias": [4]}}`.
        under: the part of the tree to read, as in `state/params`; None for the whole tree.

    Returns:
        A tree of `jax.ShapeDtypeStruct`.

    Raises:
        ImportError: `path` is a folder, and Orbax is not installed.
        ValueError: `path` cannot be read, is none of these, or has no such part.
    """
    try:
        tree = _read(path)
    except ImportError:
        raise
    except Exception as error:  # a file can be broken in more ways than anybody can name
        said = str(error)[:300] or type(error).__name__
        raise ValueError(f"{str(path)!r} cannot be read: {said}") from error
    for name in [] if under is None else under.split("/"):
        if not isinstance(tree, dict) or name not in tree:
            known = ", ".join(map(repr, tree)) if isinstance(tree, dict) else "no names"
            raise ValueError(
                f"under must name a part of the checkpoint: {name!r} is not in {known}."
            )
        tree = tree[name]
    return tree


def _read(path: Path) -> Any:
    if path.is_dir():
        tree = _of_orbax(path)
    elif path.suffix not in (".npz", ".json"):
        raise ValueError("it must be a folder of Orbax, an .npz or a .json file.")
    elif not path.is_file():
        raise ValueError("there is no such file.")
    elif path.suffix == ".npz":
        tree = _of_npz(path)
    elif path.stat().st_size > MOST_BYTES_OF_JSON:
        raise ValueError(f"a file of shapes has at most {MOST_BYTES_OF_JSON:,} bytes.")
    else:
        tree = _of_json(json.loads(path.read_text()))
    if not jax.tree.leaves(tree):
        raise ValueError("it holds no arrays.")
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
        raise ValueError("it must be a folder that Orbax has saved.")
    return jax.tree.map(lambda leaf: _shape(leaf.shape), saved.tree)


def _of_npz(path: Path) -> Any:
    """The shapes from the headers of the arrays; nothing else is unpacked or unpickled."""
    with zipfile.ZipFile(path) as file:
        shapes = {}
        for entry in file.namelist():
            with file.open(entry) as array:
                shapes[entry.removesuffix(".npy")] = _of_header(array)
    return shapes


def _of_header(array: IO[bytes]) -> jax.ShapeDtypeStruct:
    version = np.lib.format.read_magic(array)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise ValueError(f"it holds an array of the format {version}, which is not for numbers.")
    shape, _, dtype = readers[version](array)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are not unpickled.")
    return _shape(shape)


def _of_json(node: Any, depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"it is nested in more than {DEEPEST} levels.")
    if isinstance(node, dict):
        return {name: _of_json(value, depth + 1) for name, value in node.items()}
    if isinstance(node, list) and all(type(size) is int and 0 <= size < 2**63 for size in node):
        return _shape(node)
    raise ValueError(f'it must hold shapes, as in {{"bias": [4]}}; it holds {reprlib.repr(node)}.')


def _shape(shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
