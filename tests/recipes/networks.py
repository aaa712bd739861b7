"""Networks of the kinds that recipes are for, and what every optimizer of a recipe must do."""

import functools

from flax import linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests import helpers


class ResNet(linen.Module):
    """A residual network of bottlenecks: with the defaults ResNet-50."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000

    @linen.compact
    def __call__(self, images):
        def norm(x):
            return linen.BatchNorm(use_running_average=False)(x)

        x = linen.Conv(self.width, (7, 7), 2, use_bias=False, name="conv_init")(images)
        x = linen.relu(linen.BatchNorm(use_running_average=False, name="bn_init")(x))
        x = linen.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, count in enumerate(self.blocks):
            features = self.width * 2**stage
            for block in range(count):
                strides = 2 if stage and not block else 1
                y = linen.relu(norm(linen.Conv(features, (1, 1), use_bias=False)(x)))
                y = linen.relu(norm(linen.Conv(features, (3, 3), strides, use_bias=False)(y)))
                y = norm(linen.Conv(4 * features, (1, 1), use_bias=False)(y))
                if x.shape != y.shape:
                    x = norm(linen.Conv(4 * features, (1, 1), strides, use_bias=False)(x))
                x = linen.relu(x + y)
        return linen.Dense(self.classes, name="head")(x.mean(axis=(1, 2)))


class ViT(linen.Module):
    """A vision transformer: with the defaults ViT-S/16. The biases of attention have two axes."""

    depth: int = 12
    width: int = 384
    heads: int = 6
    patch: int = 16
    classes: int = 1000

    @linen.compact
    def __call__(self, images):
        patches = (self.patch, self.patch)
        x = linen.Conv(self.width, patches, patches, name="embedding")(images)
        x = x.reshape(len(x), -1, self.width)
        token = self.param("cls", linen.initializers.normal(0.02), (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(token, (len(x), 1, 1)), x], axis=1)
        shape = (1, x.shape[1], self.width)
        x = x + self.param("pos_embedding", linen.initializers.normal(0.02), shape)
        for _ in range(self.depth):
            x = x + linen.MultiHeadDotProductAttention(self.heads)(linen.LayerNorm()(x))
            y = linen.gelu(linen.Dense(4 * self.width)(linen.LayerNorm()(x)))
            x = x + linen.Dense(self.width)(y)
        x = linen.LayerNorm(name="norm")(x)[:, 0]
        return linen.Dense(self.classes, name="head")(x)


class TwoTowers(linen.Module):
    """The image tower of CLIP, with the temperature that its loss divides by."""

    @linen.compact
    def __call__(self, images):
        temperature = self.param("logit_scale", linen.initializers.ones, ())
        return jnp.exp(temperature) * ViT(1, 8, 2, 4, 3, name="visual")(images)


class Transformer(linen.Module):
    """A block of a language model."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(7, 8, name="embedding")(tokens)
        x = linen.LayerNorm()(x + linen.MultiHeadDotProductAttention(2)(x))
        x = linen.LayerNorm()(x + linen.Dense(8)(linen.gelu(linen.Dense(16)(x))))
        return linen.Dense(7, name="head")(x)


def shapes(network, *image_shape):
    """The shapes of the parameters of a network for images, without memory for them."""
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    return jax.eval_shape(network.init, jax.random.key(0), image)["params"]


@functools.cache
def trainable(kind):
    """The parameters of a small network of a kind, and the gradient of its loss."""
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3))
    tokens = jnp.asarray([[1, 2, 3, 4], [5, 6, 0, 1]])
    network, inputs, labels = {
        "resnet": lambda: (ResNet((1, 1), 4, 3), images, jnp.asarray([0, 2])),
        "vit": lambda: (ViT(1, 8, 2, 8, 3), images, jnp.asarray([0, 2])),
        "towers": lambda: (TwoTowers(), images[:, :8, :8], jnp.asarray([0, 2])),
        "probe": lambda: (linen.Dense(3), images[:, 0, :, 0], jnp.asarray([0, 2])),
        "transformer": lambda: (Transformer(), tokens, tokens[:, ::-1]),
    }[kind]()
    variables = jax.jit(network.init)(jax.random.key(0), inputs)

    def loss(params):
        found = network.apply(variables | {"params": params}, inputs, mutable=["batch_stats"])[0]
        return optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()

    return variables["params"], jax.jit(jax.grad(loss))(variables["params"])


def flat(tree):
    """By name the arrays of a tree, as float64."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf, np.float64) for path, leaf in paths}


def trained(optimizer, params, gradients):
    """The parameters after a step with each gradient of a stack."""
    return jax.jit(lambda x: helpers.trained(optimizer, x, helpers.given, gradients)[0][0])(params)


def takes_a_step(recipe, kind, **rules):
    """Two steps with the gradient of a network: a warm-up may begin with a rate of 0."""
    params, gradients = trainable(kind)
    optimizer = recipe.optimizer(params, **rules)
    update = helpers.compiled(optimizer.update)
    _, state = update(gradients, optimizer.init(params), params)
    updates, _ = update(gradients, state, params)
    for leaf, moved in flat(updates).items():
        assert np.all(np.isfinite(moved)), leaf
        assert np.any(moved != 0), leaf


def at_step(optimizer, params, step):
    """The state of an optimizer whose counters are at a step."""
    state = optimizer.init(params)
    return jax.tree.map(lambda x: jnp.full_like(x, step) if x.dtype == jnp.int32 else x, state)


def built_by_code(recipe, params):
    """The variables of the printed program, whose optimizer is checked to be that of the recipe."""
    program = {}
    exec(recipe.code(), program)
    gradients = jax.tree.map(lambda p: jnp.cos(3 * p), params)
    updates = [
        jax.jit(optimizer.update)(gradients, at_step(optimizer, params, 7), params)[0]
        for optimizer in (recipe.optimizer(params), program["optimizer"])
    ]
    jax.tree.map(np.testing.assert_array_equal, *updates)
    return program
