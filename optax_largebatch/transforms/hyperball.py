"""Steps on a sphere: the trust ratio of LAMB, and a projection back."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_largebatch import engine
from optax_largebatch.arguments import Scalar, check_choice, check_numbers
from optax_largebatch.engine.recorded_states import Facts
from optax_largebatch.engine.requests import in_one_round
from optax_largebatch.norms import inner_terms
from optax_largebatch.numerics import positive, root
from optax_largebatch.params.groups import Hyperparameter, as_grouped
from optax_largebatch.params.leaves import Leaves
from optax_largebatch.params.masks import Mask
from optax_largebatch.params.segments import Segments
from optax_largebatch.params.stacked import NOT_STACKED, Stacked, Stacks, check_stacked
from optax_largebatch.transforms.trust_ratio import adapted_leaves

Radius = Literal["now", "start"] | Scalar
"""The radius of the sphere of a block: its norm now or at the start, or a number for all."""

BALL_OF_ZEROS = 1.0
"""The radius of the ball of a block that starts at zero, over the fourth root of its number of
elements, which is the geometric mean of the norms of LeCun's starts of a matrix and its transpose.
`python -m benchmarks.zeros` compares several."""


class HyperballState(NamedTuple):
    """State of `hyperball`."""

    count: jax.Array
    """Steps taken, shape ()."""
    learning_rates: jax.Array
    """The rate of each parameter in the last step, in the order of `jax.tree.leaves`; 0 before the
    first step."""
    angles: jax.Array
    """The angle between each block before and after the last step, in radians, in the order of
    `jax.tree.leaves`; for a leaf that stacks layers, in the order of its layers. 0 for blocks that
    are not on a sphere."""
    radii: jax.Array
    """With `radius="start"` the norm of each block at its first step, otherwise 0, in the order of
    `angles`. Of a block that has been zero, the radius of its ball with the sign changed."""


def hyperball(
    learning_rate: Hyperparameter,
    *,
    radius: Radius = "now",
    trust_ratio_mask: Mask = None,
    stacked: Stacks = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Turns a direction into a step that keeps the norm of each block: its rate is an angle.

    .. math::

        w' = w - \eta_t \frac{R}{\lVert u \rVert} u, \qquad
        w \leftarrow R \, \frac{w'}{\lVert w' \rVert}, \qquad R = \lVert w \rVert

    The first half is the trust ratio of LAMB. The second half projects back onto the sphere of
    radius :math:`R`. Weight decay would change the length of :math:`w` alone, so there is none. A
    step turns :math:`w` by an angle of about :math:`\eta_t`, whatever the scale of :math:`u`.

    All norms come from one round of sums, because :math:`\lVert w' \rVert` follows from
    :math:`\lVert w \rVert`, :math:`\lVert u \rVert` and :math:`\langle w, u \rangle`. With
    :math:`c = \langle w, u \rangle / (\lVert w \rVert \lVert u \rVert)`,
    :math:`d = \eta^2 - 2 \eta c` and :math:`s = \sqrt{1 + d}`,

    .. math:: \Delta w = \frac{-d}{s (1 + s)} w - \frac{\eta R}{s \lVert u \rVert} u.

    Written as :math:`1 / s - 1`, the first factor would lose most of its digits at small rates.

    A block of zeros has no sphere: it grows in a ball of radius :math:`R = \sqrt[4]{n}` for
    :math:`n` elements, which is the norm of LeCun's start of a square matrix. It takes
    :math:`w \leftarrow w - \eta_t \frac{R}{\lVert u \rVert} u`, and is brought back to :math:`R`
    only where it is beyond it. So output projections, adapters and heads that start at 0 train. The
    state keeps which blocks these are.

    A block whose direction is 0 does not turn. The scale of a normalisation would keep its mean
    square, so leave vectors out by `trust_ratio_mask`, and embeddings too unless you want their
    norm fixed: `explain(optimizer, params)` marks what it would catch.

    Parameters in bfloat16 round most of a step away: at a rate of .001 four of five weights stay
    as they are, at .01 one of five. Put `master_weights` or `stochastic_rounding` around the
    optimizer.

    Args:
        learning_rate: length of a step relative to :math:`w`, which is the angle in radians: 0.003
            to 0.02 in published runs of MuonH. :math:`\eta`, 0 or more; a float, a schedule, or
            what `ParamGroups.per_group` returns.
        radius: the norm that a block keeps, :math:`R`. `"now"` is its norm before the step, which
            suits most runs; of a block of zeros, see above. `"start"` is its norm at the first
            step, kept in the state, so that rounding does not add up. A positive number is the
            radius of all blocks, to which the first step brings them.
        trust_ratio_mask: the parameters that stay on their spheres; None for all. The others take
            the step :math:`-\eta_t u`.
        stacked: the parameters that stack layers, so that each layer has a sphere of its own:
            patterns with their axes, `{"layers/": 0}`, or the result of `stacked_layers`. A text,
            as `{"qkv": "rows (3 columns)"}`, gives each part of an axis one, too. None if there are
            none.

    Returns:
        A transformation that needs parameters; its state is a `HyperballState`. It is the last of
        its chain, because the learning rate is inside.

    Examples:
        >>> import jax.numpy as jnp
        >>> from optax_largebatch import hyperball
        >>> params = jnp.array([3.0, 4.0])
        >>> transform = hyperball(0.75)
        >>> updates, state = transform.update(
        ...     jnp.array([-0.8, 0.6]), transform.init(params), params)
        >>> x, y = params + updates
        >>> print(f"{x:.3f} {y:.3f}, turned by {state.angles[0]:.3f}")
        4.800 1.400, turned by 0.644

    References:
        Wen et al., *Fantastic Pretraining Optimizers and Where to Find Them II: Hyperball
        Optimization*, arXiv 2606.16899.
        Levanter, `norm_preserving_update`, for `"now"`; NVIDIA Emerging-Optimizers,
        `HyperballHook`, for a given radius.
    """
    stacks = check_stacked(stacked)
    are_kept = adapted_leaves(trust_ratio_mask, stacks)
    return engine.transformation(hyperball_transform(learning_rate, radius, are_kept, stacks))


def hyperball_transform(
    learning_rate: Hyperparameter,
    radius: Radius,
    are_kept: Callable[[optax.Params], Sequence[bool]],
    stacks: Stacked,
) -> engine.LeafTransform:
    """The leaf transform of `hyperball`.

    Args:
        learning_rate: the argument of this name.
        radius: likewise.
        are_kept: from the parameters to whether each stays on its spheres.
        stacks: the stacks.
    """
    rates = as_grouped("learning_rate", learning_rate)
    kind = "given"
    given = radius
    if isinstance(radius, str):
        check_choice("radius", radius, ("now", "start"))
        kind = radius
        given = 0.0
    else:
        check_numbers("(0, inf)", radius=radius)

    def leaf(update: jax.Array, at: engine.Leaf) -> engine.LeafProgram:
        choice: _Choice = at.choice
        rates, given_radius = at.scalars
        rate = rates[choice.group]
        state = at.state._replace(learning_rates=rate)
        if not choice.is_kept:
            return -rate * update, state._replace(angles=0.0)
        norms = engine.block_norms(at.start, update)
        terms = engine.block_sums(inner_terms(at.start, update))
        norm, length, inner = yield in_one_round(norms, terms)
        if kind == "given":
            known = jnp.zeros_like(norm)
            sphere = given_radius
        else:
            segments = choice.segments
            # One ball, or one for each segment of an axis that is cut.
            lengths = 1 if segments is None else segments.lengths
            ball = BALL_OF_ZEROS * (choice.elements * lengths) ** 0.25
            if segments is not None:
                ball = segments.of_device(segments.along_axis(jnp.array(ball, norm.dtype)))
            first = jnp.where(norm == 0, -ball, norm if kind == "start" else 0.0)
            known = jnp.where(state.radii == 0, first, state.radii)
            sphere = jnp.where(known == 0, norm, jnp.abs(known))
        is_in_ball = known < 0
        ratio = norm / positive(sphere)
        moved = jnp.where(length == 0, 0, rate)
        reciprocal = 1 / positive(length)
        cos = inner * reciprocal / positive(norm)
        excess = (ratio - 1) * (ratio + 1) + moved * (moved - 2 * ratio * cos)
        is_inside = is_in_ball & (excess < 0)
        excess = jnp.where(is_inside, 0, excess)
        square = jnp.maximum(1 + excess, 0)  # of the norm of w', over the radius
        inverse = jax.lax.rsqrt(positive(square))
        angle = jnp.arctan2(moved * root(jnp.maximum(1 - cos * cos, 0)), ratio - moved * cos)
        turn = (
            -excess * inverse / (1 + square * inverse),
            -moved * sphere * reciprocal * inverse,
            jnp.where(is_inside, 0, angle),
        )
        # As one array: XLA on a GPU would take a kernel for each of the numbers.
        turn = jnp.where((square <= 0)[None], 0, jnp.stack(turn))
        (turn,) = yield engine.hoist(jnp.concatenate([turn, known[None]]))
        shrinkage, factor, angle, known = turn
        return shrinkage * at.start + factor * update, state._replace(angles=angle, radii=known)

    def choices(leaves: Leaves) -> list[_Choice]:
        groups = rates.indices(leaves.tree)
        are_on_spheres = are_kept(leaves.tree)
        chosen = []
        for index, (axes, segments) in enumerate(stacks.over_blocks(leaves)):
            elements = leaves.elements_of_block(index, axes)
            chosen.append(_Choice(groups[index], are_on_spheres[index], elements, segments))
        return chosen

    def facts(params: optax.Params) -> list[Facts]:
        known = zip(rates.of_each(params), are_kept(params), strict=True)
        return [{"rate": rate} | ({"length": "sphere"} if kept else {}) for rate, kept in known]

    return engine.LeafTransform(
        leaf,
        state=engine.declare(
            HyperballState,
            count=engine.Counter(),
            learning_rates=engine.VectorOfBlocks(NOT_STACKED),
            angles=engine.VectorOfBlocks(),
            radii=engine.NumberPerBlock(),
        ),
        scalars=lambda state: (rates.at(state.count), given),
        choices=choices,
        needs_params=True,
        stacked=stacks,
        given="parts",
        takes_complex=True,
        facts=facts,
        name="hyperball",
    )


class _Choice(NamedTuple):
    """What is known of a leaf before its step."""

    group: int
    """The index of its learning rate."""
    is_kept: bool
    """Whether it stays on its spheres."""
    elements: int
    """The number of elements of a block; if an axis is cut, of each index along it."""
    segments: Segments | None
    """The segments of an axis that are blocks."""
