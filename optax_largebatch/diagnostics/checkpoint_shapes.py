"""The shapes of the arrays in a checkpoint, for `explain`."""

from collections.abc import Iterator
import contextlib
import io
import json
import logging
from pathlib import Path
import reprlib
from typing import IO, Any
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

from optax_largebatch.params.rules import listed

MOST_BYTES_OF_JSON = 16 * 2**20
"""The size limit for a file of shapes; a larger file holds something else and fills the memory."""

MOST_BYTES_OF_HEADER = 2**16
"""The size limit for the header of an array; NumPy itself reads no header above 10,000."""

MOST_AXES = 64
"""The limit of NumPy. With more, the number of elements may have thousands of digits."""

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
            known = listed(list(map(repr, tree))) if isinstance(tree, dict) else "no names"
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
    else:
        _check_size(path)
        tree = _of_json(json.loads(path.read_text(encoding="utf-8-sig")))
    if not jax.tree.leaves(tree):
        raise ValueError("it holds no arrays.")
    return tree


def _check_size(path: Path) -> None:
    if path.stat().st_size > MOST_BYTES_OF_JSON:
        raise ValueError(f"a file of shapes has at most {MOST_BYTES_OF_JSON:,} bytes.")


def _of_orbax(path: Path) -> Any:
    if not (path / "_METADATA").is_file():
        inside = next(
            (found for at in ("*", "*/*") for found in path.glob(f"{at}/_METADATA")), None
        )
        cure = f" Give a folder inside it, such as {str(inside.parent)!r}." if inside else ""
        raise ValueError(f"it must be a folder that Orbax has saved.{cure}")
    _check_size(path / "_METADATA")
    try:
        from orbax.checkpoint import StandardCheckpointer
    except ImportError:
        raise ImportError(
            "a folder is read with Orbax, which is not installed: pip install orbax-checkpoint"
        ) from None
    with _only_errors_of("absl"), StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path.absolute()).item_metadata
    if saved is None:
        raise ValueError("it must be a folder that Orbax has saved.")
    return jax.tree.map(_of_leaf, saved.tree)


def _of_leaf(leaf: Any) -> jax.ShapeDtypeStruct | None:
    """The shape of an array; None for a string beside it."""
    return _shape(leaf.shape) if hasattr(leaf, "shape") else None


@contextlib.contextmanager
def _only_errors_of(name: str) -> Iterator[None]:
    """Leaves out the warnings of a logger: Orbax warns of files that it can do without."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _of_npz(path: Path) -> Any:
    """The shapes from the headers of the arrays; nothing else is unpacked or unpickled."""
    with zipfile.ZipFile(path) as file:
        shapes = {}
        for entry in file.infolist():
            # Others are unpacked in large pieces, however few bytes are asked for.
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{entry.filename!r} is compressed, but not as NumPy does it.")
            with file.open(entry) as array:
                header = io.BytesIO(array.read(MOST_BYTES_OF_HEADER))
            shapes[entry.filename.removesuffix(".npy")] = _of_header(header)
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
    if isinstance(node, list) and _is_shape(node):
        return _shape(node)
    raise ValueError(f'it must hold shapes, as in {{"bias": [4]}}; it holds {reprlib.repr(node)}.')


def _is_shape(sizes: Any) -> bool:
    return len(sizes) <= MOST_AXES and all(
        type(size) is int and 0 <= size < 2**63 for size in sizes
    )


def _shape(sizes: Any) -> jax.ShapeDtypeStruct:
    if not _is_shape(sizes):
        raise ValueError(f"it holds an array of the shape {reprlib.repr(sizes)}, which none has.")
    return jax.ShapeDtypeStruct(tuple(sizes), jnp.float32)
