"""What a change in the middle of a run costs: a small network that changes after some steps.

The cost is *exact*, if the next steps are those of a run that does not change; or it is a number of
steps, *after* which the loss is back; or the change is *refused*.
"""

from collections.abc import Iterator
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax

import optax_largebatch as lb
from tests.helpers import drawn
from tests.migration.switches import sums_gradients

BEFORE, AFTER, PATIENCE = 20, 10, 500
"""Steps before a change, compared after it, and in which the loss may come back."""
PARTS = ("query", "key", "value")
SHAPES = {"embed": (24, 16), "head": (16, 24)} | {
    f"{layer}/{name}": shape
    for layer in range(2)
    for name, shape in {"qkv": (16, 48), "out": (48, 16)}.items()
}


@functools.partial(jax.jit, static_argnames=("first", "every", "size"))
def loss_of(params: Any, seed: int, first: int = 0, every: int = 1, size: int = 32) -> jax.Array:
    """The cross-entropy of the word that comes after a word, of which a sixth is drawn."""
    words, others = jax.random.randint(jax.random.key(seed), (2, size), 0, 24)[:, first::every]
    x = params["embed"][words]
    for layer in range(2):
        x = x + jnp.tanh(x @ params[f"{layer}/qkv"]) @ params[f"{layer}/out"]
    targets = jnp.where(others < 4, others, (7 * words + 3) % 24)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets).mean()


@functools.cache
def make(name: str, layout: str = "apart", rate: Any = 0.01, b1: Any = 0.9) -> Any:
    """An optimizer for one of the layouts. All but AdamW know queries, keys and values apart."""
    stacked = {"layers/": 0} if layout == "stacked" else {}
    text = f"{'layers ' * len(stacked)}rows (3 columns)"
    three = {} if layout == "split" else {"qkv": text}
    adamw = optax.adamw(rate, 0.9 if callable(b1) else b1)  # it takes no schedule of b1
    moved, by_layer = ~lb.matching("embed", "head"), {"stacked": stacked | three}
    matrices = {"matrix_axes": three, "stacked": stacked}
    links = lb.orthogonalize_momentum(b1, **matrices), lb.normalize_neurons(**matrices)
    neurons = optax.masked(lb.chain(*links, lb.scale_by_learning_rate(rate)), moved.mask)
    of_muon = {"beta": b1, "others": adamw, "matrix_mask": moved, **matrices}
    return {
        "adamw": lambda: adamw,
        "lamb": lambda: lb.lamb(rate, b1, **by_layer),
        "lans": lambda: lb.lans(rate, b1=b1, **by_layer),
        "lars": lambda: lb.lars(rate, trust_coefficient=1.0, **by_layer),
        "muon": lambda: lb.muon(rate, **of_muon),
        "muonh": lambda: lb.muonh(rate, **of_muon),
        "NorMuon": lambda: optax.chain(neurons, optax.masked(adamw, (~moved).mask)),
    }[name]()


OPTIMIZERS = ("adamw", "lamb", "lans", "lars", "muon", "muonh", "NorMuon")


def stack(params: Any) -> Any:
    """Both layers in arrays of two."""
    pairs = {name: [params[f"{layer}/{name}"] for layer in range(2)] for name in ("qkv", "out")}
    ends = {name: params[name] for name in ("embed", "head")}
    return ends | {f"layers/{name}": jnp.stack(x) for name, x in pairs.items()}


def apart(params: Any) -> Any:
    """The reverse of `stack`."""
    return {
        name: params[name] if name in params else params[f"layers/{name[2:]}"][int(name[0])]
        for name in SHAPES
    }


def split(params: Any) -> Any:
    """Queries, keys and values in arrays of their own."""
    parts = {
        f"{layer}/{part}": x
        for layer in range(2)
        for part, x in zip(PARTS, jnp.split(params[f"{layer}/qkv"], 3, 1), strict=True)
    }
    return {name: x for name, x in params.items() if "qkv" not in name} | parts


def join(params: Any) -> Any:
    """The reverse of `split`."""

    def joined(layer: str) -> jax.Array:
        return jnp.concatenate([params[f"{layer}/{part}"] for part in PARTS], 1)

    return {name: params[name] if name in params else joined(name[0]) for name in SHAPES}


def grown(params: Any) -> Any:
    """With more words, and a head of its own for them."""
    embed = jnp.pad(params["embed"], ((0, 8), (0, 0)))
    return params | {"embed": embed, "head": jnp.zeros((16, 32))}


def halves(params: Any) -> Any:
    """In bfloat16."""
    return jax.tree.map(lambda x: x.astype("bfloat16"), params)


def same(params: Any) -> Any:
    """As they are."""
    return params


class Run(NamedTuple):
    """A run of an optimizer so far."""

    optimizer: Any
    params: Any
    state: Any
    steps: int = 0
    layout: Any = same
    """From parameters as they are at the start to those of the run, and from gradients."""
    back: Any = same
    every: int = 1
    """Micro-batches of a step."""

    def weights(self) -> Any:
        """The parameters as they are at the start; masters, if there are any."""
        return self.back(getattr(self.state, "master", None) or self.params)

    def each_until(self, steps: int) -> Iterator["Run"]:
        """The run after each of some steps, and as it is now."""
        run, update = self, jax.jit(self.optimizer.update)
        yield run
        for number in range(self.steps, steps):
            weights = run.weights()
            for k in range(self.every):
                gradient = self.layout(jax.grad(loss_of)(weights, number, k, self.every))
                updates, state = update(gradient, run.state, run.params)
                params = jax.jit(optax.apply_updates)(run.params, updates)
                run = run._replace(params=params, state=state, steps=number + 1)
            yield run

    def until(self, steps: int) -> "Run":
        """The run after more steps."""
        return list(self.each_until(steps))[-1]

    def adopted(
        self,
        optimizer: Any,
        params: Any = None,
        convert: Any = None,
        forget: Any = None,
        **new: Any,
    ) -> "Run":
        """The run with another optimizer, and maybe other parameters."""
        params, old_params = (self.params, None) if params is None else (params, self.params)
        old = self.optimizer if convert or sums_gradients(self.state) else None
        known = {"old_params": old_params, "old_optimizer": old, "step": self.steps}
        changed = {"convert": convert, "forget": forget}
        state = lb.adopt_state(optimizer, params, self.state, **known, **changed)
        return self._replace(optimizer=optimizer, params=params, state=state, **new)


def begun(optimizer: Any, seed: int = 0, dtype: str = "float64") -> Run:
    """A run at its start."""
    params = {name: x / 4 for name, x in drawn(SHAPES, dtype, seed).items()}
    return Run(optimizer, params, optimizer.init(params))


@functools.cache
def before(name: str, seed: int = 0, dtype: str = "float64") -> Run:
    """A run before its change."""
    return begun(make(name), seed, dtype).until(BEFORE)


def on_meshes(name: str, run: Run, shapes: Any) -> Run:
    """On other devices, as from a checkpoint."""
    for shape in shapes:
        run = run.until(run.steps + 3)
        devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
        mesh = jax.sharding.Mesh(devices, ("x", "y"))
        params = jax.device_put(run.params, NamedSharding(mesh, PartitionSpec("x", "y")))
        layout = lb.optimizer_state_shardings(run.optimizer, params, mesh)
        run = run._replace(params=params, state=jax.device_put(run.state, layout))
        if name in ("muon", "muonh", "NorMuon"):
            shardings = jax.tree.map(lambda x: x.sharding, params)
            run = run._replace(optimizer=lb.with_partition_specs(make(name), shardings))
    return run


def micro_batches(name: str, run: Run) -> Run:
    """With four gradients for each step."""
    return run.adopted(lb.accumulate_gradients(make(name), every=4), every=4)


def batch_stage(name: str, run: Run) -> Run:
    """With the optimizer of the next stage."""
    return run.adopted(staged(name))


def staged(name: str) -> Any:
    """Rate and momentum move with the batch, as a plan moves them."""
    moved = (
        optax.piecewise_constant_schedule(x, {BEFORE: by}) for x, by in ((0.01, 2), (0.9, 0.9))
    )
    return make(name, "apart", *moved)


def in_layout(name: str, run: Run, layout: str, there: Any, back: Any) -> Run:
    """In another layout for some steps."""
    other = make(name, layout)
    run = run.adopted(other, there(run.params), there, layout=there, back=back)
    run = run.until(run.steps + 5)
    return run.adopted(make(name), back(run.params), back, layout=same, back=same)


def new_head(name: str, run: Run) -> Run:
    """With a head that begins anew."""
    return run.adopted(make(name), grown(run.params), grown, lb.matching("head"))


def masters(name: str, run: Run) -> Run:
    """With masters for some steps."""
    run = run.adopted(lb.master_weights(make(name)), halves(run.params)).until(run.steps + 5)
    return run._replace(params=run.state.master).adopted(make(name))


CHANGES = {
    "devices": functools.partial(on_meshes, shapes=((8, 1), (2, 1), (8, 1))),
    "mesh": functools.partial(on_meshes, shapes=((8, 1), (4, 2))),
    "micro-batches": micro_batches,
    "batch stage": batch_stage,
    "stacked, and apart": functools.partial(in_layout, layout="stacked", there=stack, back=apart),
    "split, and joined": functools.partial(in_layout, layout="split", there=split, back=join),
    "new head": new_head,
    "masters": masters,
    "to MuonH": lambda name, run: run.adopted(make("muonh")),
    "to AdamW": lambda name, run: run.adopted(make("adamw")),
}


def cost(change: str, name: str, seeds: int = 1) -> str:
    """What a change costs with an optimizer."""
    dtype, allowed = ("float32", 1e-6) if change == "masters" else ("float64", 1e-12)
    old = before(name, 0, dtype)
    try:
        new = CHANGES[change](name, old)
    except ValueError as error:
        return f"refused: {error}"
    unchanged = begun(staged(name)) if change == "batch stage" else old
    weights = [run.until(BEFORE + AFTER).weights() for run in (new, unchanged)]
    if change != "new head" and largest_difference(*weights) <= allowed:
        return "exact"
    steps = [bump(change, name, seed) for seed in range(seeds)]
    return f"after {int(np.median(steps))} ({min(steps)} to {max(steps)})"


def largest_difference(tree: Any, other: Any) -> float:
    """Relative to the largest number of each array."""
    pairs = zip(*map(jax.tree.leaves, jax.device_get((tree, other))), strict=True)
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


def bump(change: str, name: str, seed: int) -> int:
    """The steps after which the loss of many words is what it was before the change."""

    def loss(run: Run) -> float:
        return float(loss_of(run.weights(), 2**30, size=2048))

    old = before(name, seed)
    runs = CHANGES[change](name, old).each_until(BEFORE + PATIENCE)
    next(runs)
    return next(k for k, run in enumerate(runs, 1) if loss(run) <= loss(old))
