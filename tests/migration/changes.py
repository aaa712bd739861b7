"""What a change in the middle of a run costs: `python -m tests.migration.changes` prints a table.

In each cell a small network changes after some steps. It is *exact*, if the next steps are those of
a run that does not change; it costs a *bump*, the steps until the loss is back; or it is *refused*.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import optax_largebatch as lb
from tests.conftest import enable_x64
from tests.migration.switches import sums_gradients

BEFORE, AFTER, PATIENCE = 20, 10, 60
"""Steps before a change, compared after it, and in which the loss may come back."""
WIDTH, WORDS, MORE_WORDS, BATCH = 16, 24, 8, 32
LAYERS = ("layer0", "layer1")
PARTS = ("query", "key", "value")


def start(seed, dtype):
    """A table, two layers and a head."""
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return jnp.asarray(rng.normal(size=shape) / WIDTH**0.5, dtype)

    layers = {
        name: {
            "qkv": drawn(WIDTH, 3 * WIDTH),
            "out": drawn(WIDTH, WIDTH),
            "scale": jnp.ones(WIDTH, dtype),
        }
        for name in LAYERS
    }
    return {"embed": drawn(WORDS, WIDTH), **layers, "head": drawn(WIDTH, WORDS)}


def loss_of(params, key, first=0, every=1, size=BATCH):
    """The cross-entropy of the word that comes after a word, of which a sixth is drawn."""
    words, others = jax.random.randint(key, (2, size), 0, WORDS)
    words, others = words[first::every], others[first::every]
    x = params["embed"][words]
    for name in LAYERS:
        layer = params[name]
        query, gate, value = jnp.split(x @ layer["qkv"], 3, axis=1)
        x = x + layer["scale"] * ((query * jnp.tanh(gate) + value) @ layer["out"])
    targets = jnp.where(others < WORDS // 6, others, (7 * words + 3) % WORDS)
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], targets).mean()


SHAPES = ("first", "every", "size")
LOSS = jax.jit(loss_of, static_argnames=SHAPES)
GRADIENT = jax.jit(jax.grad(loss_of), static_argnames=SHAPES)


@jax.jit
def apply(params, updates):
    return jax.tree.map(lambda x, u: (x + u).astype(x.dtype), params, updates)


@functools.cache
def make(name, rate=0.01, b1=0.9, layout="apart"):
    """One of the seven optimizers. All but AdamW know queries, keys and values from each other."""
    stacked = {"layers/": 0} if layout == "stacked" else {}
    three = {"qkv": "layers rows (3 columns)" if stacked else "rows (3 columns)"}
    three = {} if layout == "split" else three
    matrices = {"matrix_axes": three, "stacked": stacked}
    by_layer = {"stacked": stacked | three}
    moved = ~lb.matching("embed", "head")
    of_optax = optax.adamw(rate, 0.9 if callable(b1) else b1)  # it takes no schedule of b1
    of_muon = {"beta": b1, "others": of_optax, "matrix_mask": moved, **matrices}
    if name == "NorMuon":
        links = lb.orthogonalize_momentum(b1, **matrices), lb.normalize_neurons(**matrices)
        chain = lb.chain(*links, lb.scale_by_learning_rate(rate))
        chosen = moved & ~lb.matching("scale")
        rest = optax.masked(of_optax, (~chosen).mask)
        return optax.chain(optax.masked(chain, chosen.mask), rest)
    return {
        "adamw": lambda: of_optax,
        "lamb": lambda: lb.lamb(rate, b1, **by_layer),
        "lans": lambda: lb.lans(rate, b1=b1, **by_layer),
        "lars": lambda: lb.lars(rate, momentum=0.9, trust_coefficient=1.0, **by_layer),
        "muon": lambda: lb.muon(rate, **of_muon),
        "muonh": lambda: lb.muonh(rate, **of_muon),
    }[name]()


OPTIMIZERS = ("adamw", "lamb", "lans", "lars", "muon", "muonh", "NorMuon")


def same(params):
    return params


def stack(params):
    layers = jax.tree.map(lambda *x: jnp.stack(x), *[params[name] for name in LAYERS])
    return {"embed": params["embed"], "layers": layers, "head": params["head"]}


def apart(params):
    first, second = (jax.tree.map(operator.itemgetter(k), params["layers"]) for k in range(2))
    layers = dict(zip(LAYERS, (first, second), strict=True))
    return {"embed": params["embed"], **layers, "head": params["head"]}


def split(params):
    def of_layer(layer):
        parts = dict(zip(PARTS, jnp.split(layer["qkv"], 3, axis=1), strict=True))
        return {**parts, "out": layer["out"], "scale": layer["scale"]}

    return params | {name: of_layer(params[name]) for name in LAYERS}


def join(params):
    def of_layer(layer):
        joined = jnp.concatenate([layer[part] for part in PARTS], axis=1)
        return {"qkv": joined, "out": layer["out"], "scale": layer["scale"]}

    return params | {name: of_layer(params[name]) for name in LAYERS}


def grown(params):
    """With more words, and a head of its own for them."""
    embed = jnp.pad(params["embed"], ((0, MORE_WORDS), (0, 0)))
    return params | {"embed": embed, "head": jnp.zeros((WIDTH, WORDS + MORE_WORDS))}


def halves(params):
    return jax.tree.map(lambda x: x.astype("bfloat16"), params)


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

    def weights(self):
        """The parameters as they are at the start; masters, if there are any."""
        return self.back(getattr(self.state, "master", None) or self.params)

    def until(self, steps):
        """The run after more steps."""
        return list(self.each_until(steps))[-1]

    def each_until(self, steps):
        """The run now and after each of some steps."""
        run, update = self, jax.jit(self.optimizer.update)
        yield run
        for number in range(self.steps, steps):
            weights = run.weights()
            for k in range(self.every):
                gradient = GRADIENT(weights, jax.random.key(number), k, self.every)
                updates, state = update(self.layout(gradient), run.state, run.params)
                run = run._replace(params=apply(run.params, updates), state=state)
            run = run._replace(steps=number + 1)
            yield run

    def losses(self, steps):
        """The loss of many words before and after each of some steps."""
        for run in self.each_until(steps):
            yield float(LOSS(run.weights(), jax.random.key(2**30), size=2048))

    def adopted(self, optimizer, params=None, convert=None, forget=None):
        """The run with another optimizer, and maybe other parameters."""
        params, old_params = (self.params, None) if params is None else (params, self.params)
        is_asked_for = convert or sums_gradients(self.state)
        state = lb.adopt_state(
            optimizer,
            params,
            self.state,
            step=self.steps,
            old_optimizer=self.optimizer if is_asked_for else None,
            old_params=old_params,
            convert=convert,
            forget=forget,
        )
        return self._replace(optimizer=optimizer, params=params, state=state)


@functools.cache
def before(name, seed=0, dtype="float64"):
    """A run before its change."""
    return begun(make(name), seed, dtype).until(BEFORE)


def begun(optimizer, seed=0, dtype="float64"):
    params = start(seed, dtype)
    return Run(optimizer, params, optimizer.init(params))


def on_mesh(run, shape, names, spec):
    """The run on other devices, as from a checkpoint."""
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, names)

    def sharding(x):
        return NamedSharding(mesh, P(*spec[-x.ndim :]))

    params = jax.device_put(run.params, jax.tree.map(sharding, run.params))
    layout = lb.optimizer_state_shardings(run.optimizer, params, mesh)
    return run._replace(params=params, state=jax.device_put(run.state, layout))


def devices(name, run):
    for count, steps in ((8, 3), (2, 3), (8, 0)):
        run = on_mesh(run, (count,), ("data",), (None, "data")).until(run.steps + steps)
    return run


def mesh(name, run):
    run = on_mesh(run, (8,), ("data",), (None, None)).until(run.steps + 3)
    return on_mesh(run, (4, 2), ("fsdp", "tensor"), ("fsdp", "tensor"))


def micro_batches(name, run):
    return run.adopted(lb.accumulate_gradients(make(name), every=4))._replace(every=4)


def batch_stage(name, run):
    return run.adopted(staged(name))


def staged(name):
    """Rate and momentum move with the batch, as a plan moves them."""
    rate, b1 = (
        optax.piecewise_constant_schedule(x, {BEFORE: by}) for x, by in ((0.01, 2.0), (0.9, 0.9))
    )
    return make(name, rate, b1)


def layers(name, run):
    stacked = make(name, layout="stacked")
    there = run.adopted(stacked, stack(run.params), stack)._replace(layout=stack, back=apart)
    there = there.until(run.steps + 5)
    return there.adopted(make(name), apart(there.params), apart)._replace(layout=same, back=same)


def qkv(name, run):
    of_each = make(name, layout="split")
    there = run.adopted(of_each, split(run.params), split)._replace(layout=split, back=join)
    there = there.until(run.steps + 5)
    return there.adopted(make(name), join(there.params), join)._replace(layout=same, back=same)


def new_head(name, run):
    return run.adopted(make(name), grown(run.params), grown, lb.matching("head"))


def masters(name, run):
    there = run.adopted(lb.master_weights(make(name)), halves(run.params)).until(run.steps + 5)
    return there._replace(params=there.state.master).adopted(make(name))


def to_muonh(name, run):
    return run.adopted(make("muonh"))


def to_adamw(name, run):
    return run.adopted(make("adamw"))


CHANGES = {
    "devices 8, 2, 8": devices,
    "mesh data, then fsdp x tensor": mesh,
    "micro-batches": micro_batches,
    "a stage of the batch": batch_stage,
    "layers stacked, and apart": layers,
    "QKV split, and joined": qkv,
    "a new head, more words": new_head,
    "masters and bfloat16, and back": masters,
    "to MuonH": to_muonh,
    "to AdamW": to_adamw,
}


def cell(change, name, seeds=1):
    """What a change costs with an optimizer."""
    dtype, allowed = ("float32", 1e-6) if change.startswith("masters") else ("float64", 1e-12)
    old = before(name, 0, dtype)
    try:
        new = CHANGES[change](name, old)
    except ValueError as error:
        return f"refused: {error}"
    if change != "a new head, more words":
        unchanged = begun(staged(name)) if change == "a stage of the batch" else old
        pair = (run.until(BEFORE + AFTER).weights() for run in (new, unchanged))
        if largest_difference(*pair) <= allowed:
            return "exact"
    steps = [bump(change, name, seed) for seed in range(seeds)]
    return f"bump {int(np.median(steps))} ({min(steps)} to {max(steps)})"


def largest_difference(tree, other):
    """Relative to the largest number of each array."""
    pairs = zip(*map(jax.tree.leaves, jax.device_get((tree, other))), strict=True)
    return max(np.abs(x - y).max() / np.abs(y).max() for x, y in pairs)


def bump(change, name, seed):
    """The steps after which the loss is what it was before the change."""
    old = before(name, seed)
    (loss,) = old.losses(BEFORE)
    after = CHANGES[change](name, old).losses(BEFORE + PATIENCE)
    return next((k for k, x in enumerate(after) if k and x <= loss), PATIENCE)


def main():
    """Prints the table."""
    for change in CHANGES:
        for name in OPTIMIZERS:
            print(f"{change} | {name} | {cell(change, name, seeds=5)}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    with enable_x64(True):
        main()
