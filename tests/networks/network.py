"""Parameter trees of real networks, and what somebody who knows each of them would say.

A file of `trees` has the names and shapes of a network at the size that people train, and how each
array starts; it has no values. Its keys are

- `source`: the library or the repository, the class and its settings;
- `derived_from_source`: true if the tree was read in source files, and not made by running them;
- `should`: the arguments that are right, or null where there is nothing to say: `stacked`,
  `matrix_axes`, and patterns of the `embeddings`, of the `head`, and of the matrices that start at
  `zero`, which every optimizer moves;
- `leaves`: the arrays.

An array has

- `path`: the keys from the root. Strings are keys of dictionaries, numbers are places in lists;
- `repeat`: if several differ in the numbers of their names alone, the numbers of each, which fill
  the `{}` and the nulls of the path;
- `shape`; the dtype is float32;
- `init`: `zeros`, `ones`, `constant c`, `fixed` (the same in each run), or how it is drawn;
- `kind`: `matrix`, `conv`, `depthwise`, `embedding`, `position`, `head`, `token`, or a kind of
  vector;
- `axes`: a word for each axis. `rows` are the inputs of a matrix and `columns` its outputs.
  `layers`, `experts` and `members` count layers. `column_heads` and `row_heads` may count matrices,
  or belong to the columns or the rows. Of an axis with another name all of this is right;
- `fused`: if several matrices lie side by side, a text for `matrix_axes`;
- `stem`: true for a first layer, which Muon or Adam may move;
- `complex_pair`: true for the real and imaginary parts of complex matrices, which Adam moves.
"""

import dataclasses
import json
import math
from pathlib import Path
import re

import jax

import optax_largebatch as lb

TREES = Path(__file__).parent / "trees"
NAMES = sorted(path.stem for path in TREES.glob("*.json"))

OPTIMIZERS = ("lamb", "lans", "lars", "muon", "muonh", "adamh", "planned_optimizer")
WITH_MUON = ("muon", "muonh", "planned_optimizer")

AXES_OF_LAYERS = ("layers", "experts", "members")
VECTORS = ("bias", "norm", "vector", "scalar", "state")
"""The kinds of arrays that are no matrices, whatever their axes."""

ALIKE = 2
"""How many arrays are taken of those that differ in the numbers of their names alone."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a network."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    init: str
    kind: str
    axes: tuple[str, ...]
    fused: str = ""
    stem: bool = False
    complex_pair: bool = False

    @property
    def name(self):
        return "/".join(map(str, self.path))

    @property
    def layers(self):
        """How many separate layers it has."""
        return math.prod(
            n for n, axis in zip(self.shape, self.axes, strict=True) if axis in AXES_OF_LAYERS
        )

    @property
    def ndim_of_a_layer(self):
        return sum(axis not in AXES_OF_LAYERS for axis in self.axes)

    @property
    def is_vector(self):
        return self.kind in VECTORS

    @property
    def is_matrix(self):
        """Whether Muon should move it, if it is not the first layer."""
        return self.kind in ("matrix", "conv") and not self.complex_pair


class Network:
    """A network: its arrays, and the arguments that are right for it."""

    def __init__(self, name):
        content = json.loads((TREES / f"{name}.json").read_text())
        self.name = name
        self.should = content["should"]
        leaves = [leaf for entry in content["leaves"] for leaf in _leaves(entry)]
        tree = _tree(leaves)
        self.leaves = jax.tree.leaves(tree)
        """In the order of the parameters."""
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), tree)

    def arguments(self, optimizer):
        """What somebody who knows the network tells an optimizer, one of `OPTIMIZERS`."""
        embeddings, head = self.should["embeddings"] or [], self.should["head"] or []
        told = {"stacked": _tuples(self.should["stacked"] or {})}
        if optimizer in WITH_MUON and self.should["matrix_axes"]:
            told["matrix_axes"] = _tuples(self.should["matrix_axes"])
        if optimizer in ("muon", "muonh") and (embeddings or head):
            told["matrix_mask"] = ~lb.matching(*embeddings, *head)
        if optimizer == "planned_optimizer":
            told |= {"embeddings": _rule(embeddings), "head": _rule(head)}
        if optimizer == "adamh" and (by_adam := [*self._wide_vectors(), *embeddings]):
            told["adamh_mask"] = lb.at_least_ndim(2) & ~lb.matching(*by_adam)
        return told

    def _wide_vectors(self):
        """Patterns of the vectors that have two axes or more."""
        return [
            f"^{re.escape(leaf.name)}$"
            for leaf in self.leaves
            if leaf.is_vector and leaf.ndim_of_a_layer > 1
        ]


def _leaves(entry):
    """The arrays of a line of a file, but no more than `ALIKE`."""
    fields = entry | {"shape": tuple(entry["shape"]), "axes": tuple(entry["axes"].split())}
    path, repeat = fields.pop("path"), fields.pop("repeat", [[]])
    return [Leaf(_filled(path, values), **fields) for values in repeat[:ALIKE]]


def _filled(path, values):
    """A path with the values in their places."""
    left = iter(values)
    return tuple(_key(key, left) for key in path)


def _key(key, left):
    if key is None:
        return next(left)
    return key if isinstance(key, int) else re.sub(r"\{\}", lambda _: str(next(left)), key)


def _tree(leaves):
    root = {}
    for leaf in leaves:
        node = root
        for key in leaf.path[:-1]:
            node = node.setdefault(key, {})
        node[leaf.path[-1]] = leaf
    return _with_lists(root)


def _with_lists(node):
    """Lists in the place of dictionaries whose keys are 0, 1, 2, ..."""
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(child) for key, child in node.items()}
    if set(children) == {*range(len(children))}:
        return [children[place] for place in range(len(children))]
    return children


def _tuples(value):
    """The value with tuples in the place of the lists of JSON."""
    if isinstance(value, dict):
        return {key: _tuples(entry) for key, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _rule(patterns):
    return lb.matching(*patterns) if patterns else None
