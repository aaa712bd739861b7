"""The critical batch size, measured by runs that start from one training state."""

from collections.abc import Callable, Iterable, Sequence
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_largebatch.arguments import check_integer, check_number, known_number
from optax_largebatch.diagnostics.critical_batch_size import (
    CriticalBatchSize,
    different_sizes,
    fit_critical_batch_size,
)

TOO_SLOW = 4
"""The limit for a run, as a multiple of the steps at the fastest learning rate."""


class MeasuredCriticalBatchSize(NamedTuple):
    """The result of `measure_critical_batch_size`."""

    batch_sizes: tuple[int, ...]
    learning_rates: tuple[float, ...]
    steps: np.ndarray
    """Steps to the target, shape (batch sizes, learning rates, runs); infinite where a run did not
    reach the target."""

    @property
    def best_learning_rates(self) -> tuple[float, ...]:
        """The learning rate with the fewest mean steps, for each batch size."""
        return tuple(self.learning_rates[index] for index in self._best)

    @property
    def best_steps(self) -> np.ndarray:
        """The steps at the best learning rates, shape (batch sizes, runs)."""
        return self.steps[np.arange(len(self.batch_sizes)), self._best]

    @property
    def at_edge(self) -> tuple[bool, ...]:
        """Whether the best learning rate is at an end of the grid, for each batch size.

        A better rate may lie beyond the grid: extend it in that direction before you believe the
        fit.
        """
        last = len(self.learning_rates) - 1
        return tuple(index in (0, last) for index in self._best)

    @property
    def fit(self) -> CriticalBatchSize:
        """The fit of `fit_critical_batch_size` to the best steps.

        If the steps do not bend, it raises ValueError; the measured table stays available.
        """
        return fit_critical_batch_size(self.batch_sizes, self.best_steps.tolist())

    @property
    def _best(self) -> np.ndarray:
        return np.argmin(self.steps.mean(axis=2), axis=1)

    def summary(self) -> str:
        """The best learning rates with their steps, in a few readable lines."""
        lines = []
        columns = self.batch_sizes, self.best_steps, self.best_learning_rates, self.at_edge
        for batch, steps, rate, at_edge in zip(*columns, strict=True):
            line = f"batch size {batch}: {steps.mean():.4g} steps at the learning rate {rate:.4g}"
            edge = ", the edge of the grid: add rates beyond it" if at_edge else ""
            lines.append(line + edge)
        return "\n".join(lines)


def measure_critical_batch_size(
    params: Any,
    loss: Callable[[Any, jax.Array, int], jax.Array],
    make_optimizer: Callable[[jax.Array], optax.GradientTransformation],
    *,
    batch_sizes: Sequence[int],
    learning_rates: Sequence[float],
    evaluate: Callable[[Any], jax.Array],
    target: float,
    max_steps: int,
    evaluate_every: int = 1,
    smoothing: float = 0.1,
    optimizer_state: Any = None,
    runs: int = 3,
    seed: int = 0,
    progress: Callable[[list[Any]], Iterable[Any]] = iter,
) -> MeasuredCriticalBatchSize:
    r"""Trains from one state at several batch sizes and learning rates, and counts the steps.

    Every batch size is tried with every learning rate, in several runs that draw different
    examples. :math:`S = S_{min} (1 + B_{crit} / B)` is fitted to the steps at the best rate of each
    batch size. The learning rates of a batch size train side by side under `jax.vmap`, all on the
    same examples.

    **When a run reaches the target.** With the :math:`n`-th evaluated loss :math:`\ell_n`, its step
    :math:`t_n` and the smoothing :math:`\beta`,

    .. math::

        \bar\ell_n = \bar\ell_{n-1} + \alpha_n (\ell_n - \bar\ell_{n-1}), \qquad
        \bar t_n = \bar t_{n-1} + \alpha_n (t_n - \bar t_{n-1}), \qquad
        \alpha_n = \min\left(1, \frac{1}{\beta n}\right),

    and the run ends where the line through the points :math:`(\bar t_n, \bar\ell_n)` first reaches
    the target. The average covers the same part of a short and of a long run, so no batch size is
    favoured. Steps are averaged like losses, so the average causes no delay.

    A run whose loss is not finite has diverged and counts as infinitely many steps. So does a run
    that is stopped because it takes more than `max_steps`, or more than four times as many steps as
    the fastest learning rate on the same examples.

    Args:
        params: the parameters at which all runs begin, a tree of arrays. Take them after some steps
            of training: the critical batch size is small at the start of a run and grows during it.
        loss: a function of the parameters, a key and the batch size (a Python integer) that returns
            the mean loss of examples drawn at random. It is traced and differentiated, so the data
            must be arrays on the device.
        make_optimizer: a function from a learning rate to its optimizer. The rate is a traced
            scalar, as under `optax.inject_hyperparams`; all optimizers of this library accept one.
        batch_sizes: at least three different batch sizes, in the order of the runs. Each is
            compiled once.
        learning_rates: positive and increasing. The best rate of every batch size should lie inside
            the grid. Neighbours a factor of 1.5 to 2 apart cost a few percent of the steps.
        evaluate: a function of the parameters that returns the loss that has to reach the target,
            usually on held-out examples, the same in each call. The less it varies, the better.
        target: the loss to reach, below the loss at the start.
        max_steps: the step at which a run is stopped, 1 or more.
        evaluate_every: steps between two evaluations, 1 or more. Between them the loss counts as
            linear.
        smoothing: the part of a run over which the loss is averaged, so that noise does not make
            the first crossing early; 0 for no average. :math:`\beta`, in [0, 1).
        optimizer_state: the state of `make_optimizer(...)` with which all runs begin; None for a
            new state. It must not hold a learning rate, as the state of `optax.inject_hyperparams`
            does.
        runs: the number of runs at every batch size and learning rate, 1 or more. The interval of
            the fit needs several.
        seed: the seed of the keys that draw the examples.
        progress: a function that wraps the list of tasks for a progress bar, such as `tqdm.tqdm`.

    Returns:
        The table of steps, with `best_learning_rates`, `best_steps`, `at_edge`, `fit`, `summary()`.
        The interval of the fit uses the runs at the best rates, as if these rates were known.

    Raises:
        ValueError: an argument is out of its range, no learning rate reaches the target in all its
            runs at some batch size, or the learning rate makes no difference.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from optax_largebatch import measure_critical_batch_size
        >>> def half_square(params):
        ...     return 0.5 * jnp.sum(params**2)
        >>> def loss(params, key, batch_size):
        ...     examples = jax.random.normal(key, (batch_size, 50))
        ...     return half_square(params - jnp.mean(examples, axis=0))
        >>> measured = measure_critical_batch_size(
        ...     jnp.full(50, 2.0), loss, optax.sgd,
        ...     batch_sizes=[4, 16, 64], learning_rates=[0.1, 0.2, 0.4, 0.8, 1.6],
        ...     evaluate=half_square, target=1.0, max_steps=200)
        >>> measured.steps.shape
        (3, 5, 3)
        >>> print(measured.best_learning_rates, measured.at_edge)
        (0.2, 0.8, 0.8) (False, False, False)
        >>> low, high = measured.fit.interval
        >>> print(low < measured.fit.critical_batch_size < high)
        True

    References:
        McCandlish et al., *An Empirical Model of Large-Batch Training*, arXiv 1812.06162;
        Shallue et al., *Measuring the Effects of Data Parallelism on Neural Network Training*,
        arXiv 1811.03600, for tuning the rate at every batch size.
    """
    check_number("target", target, "(-inf, inf)")
    check_integer("max_steps", max_steps, at_least=1)
    check_integer("evaluate_every", evaluate_every, at_least=1)
    check_number("smoothing", smoothing, "[0, 1)")
    check_integer("runs", runs, at_least=1)
    check_integer("seed", seed, at_least=0)
    batches = different_sizes(batch_sizes).astype(int).tolist()
    for index, batch in enumerate(batch_sizes):
        check_integer(f"batch_sizes[{index}]", batch, at_least=1)
    rates = _checked_rates(learning_rates)
    start = _checked_start(evaluate(params), target)

    def begin(rate: jax.Array) -> _Run:
        state = make_optimizer(rate).init(params) if optimizer_state is None else optimizer_state
        loss = jnp.asarray(start, rate.dtype)
        return _Run(params, state, loss, jnp.zeros_like(loss), loss, jnp.full_like(loss, jnp.inf))

    @functools.partial(jax.jit, static_argnums=0)
    def train(
        batch_size: int,
        rates: jax.Array,
        key: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The steps to the target and the lowest loss, for each rate."""

        def advance(
            done: jax.Array,
            rate: jax.Array,
            run: _Run,
        ) -> _Run:
            """The run after the steps up to the next evaluation; `done` were taken before."""
            optimizer = make_optimizer(rate)

            def step(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                params, state = carry
                step_key = jax.random.fold_in(key, done + index)
                gradients = jax.grad(loss)(params, step_key, batch_size)
                updates, state = optimizer.update(gradients, state, params)
                return optax.apply_updates(params, updates), state

            now, state = jax.lax.fori_loop(0, evaluate_every, step, (run.params, run.state))
            next_step = (done + evaluate_every).astype(rate.dtype)
            window = jnp.maximum(1, smoothing * next_step / evaluate_every)
            smoothed = run.loss + (evaluate(now).astype(run.loss.dtype) - run.loss) / window
            at_step = run.step + (next_step - run.step) / window
            # The crossing of the line from the last point, which lies above the target.
            crossing = run.step + (at_step - run.step) * (run.loss - target) / (run.loss - smoothed)
            arrives = jnp.isinf(run.arrived) & (smoothed <= target) & jnp.isfinite(smoothed)
            lowest = jnp.where(smoothed < run.lowest, smoothed, run.lowest)
            arrived = jnp.where(arrives, crossing, run.arrived)
            return _Run(now, state, smoothed, at_step, lowest, arrived)

        def goes_on(carry: tuple[jax.Array, _Run]) -> jax.Array:
            done, run = carry
            limit = jnp.minimum(max_steps, TOO_SLOW * run.arrived.min())
            running = jnp.isfinite(run.loss) & jnp.isinf(run.arrived)
            return jnp.any(running) & (done.astype(limit.dtype) < limit)

        def body(carry: tuple[jax.Array, _Run]) -> tuple[jax.Array, _Run]:
            done, run = carry
            run = jax.vmap(advance, (None, 0, 0))(done, rates, run)
            return done + evaluate_every, run

        first = jnp.zeros([], jnp.int32), jax.vmap(begin)(rates)
        _, end = jax.lax.while_loop(goes_on, body, first)
        return end.arrived, end.lowest

    of_each = jnp.asarray(rates, float)
    steps = np.full((len(batches), len(rates), runs), np.inf)
    lowest = np.full_like(steps, start)
    for (index, batch), run in progress([*itertools.product(enumerate(batches), range(runs))]):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), batch), run)
        steps[index, :, run], lowest[index, :, run] = train(batch, of_each, key)
        if run == runs - 1:
            _check_arrived(batch, rates, steps[index], lowest[index], max_steps)
    return MeasuredCriticalBatchSize(tuple(batches), tuple(rates), steps)


class _Run(NamedTuple):
    """One run; under `vmap`, one for each learning rate."""

    params: Any
    state: Any
    loss: jax.Array
    """The smoothed loss."""
    step: jax.Array
    """The step to which the smoothed loss belongs."""
    lowest: jax.Array
    arrived: jax.Array
    """Steps to the target, infinite before it is reached."""


def _checked_rates(learning_rates: Any) -> list[float]:
    if not hasattr(learning_rates, "__len__"):
        raise TypeError(f"learning_rates must be a sequence of numbers, got {learning_rates!r}.")
    rates = [
        known_number(f"learning_rates[{index}]", rate, "(0, inf)")
        for index, rate in enumerate(learning_rates)
    ]
    if not rates or rates != sorted({*rates}):
        raise ValueError(f"learning_rates must be increasing, at least one, got {rates}.")
    return rates


def _checked_start(measured: Any, target: float) -> float:
    if np.shape(measured) != ():
        raise ValueError(
            f"evaluate must return a scalar, got the shape {np.shape(measured)}: take the mean."
        )
    start = float(measured)
    if not target < start < np.inf:
        raise ValueError(
            f"target must be below the loss from which the runs begin, evaluate(params) = "
            f"{start:.4g}, got {target!r}. Lower it, or begin from an earlier state."
        )
    return start


def _check_arrived(
    batch: int,
    rates: list[float],
    steps: np.ndarray,
    lowest: np.ndarray,
    max_steps: int,
) -> None:
    """Checks that a batch size has a best rate: `steps` and `lowest` by rate and run."""
    finite = np.isfinite(steps)
    if not np.any(np.all(finite, axis=1)):
        rate = rates[np.argmin(lowest.min(axis=1))]
        raise ValueError(
            f"target must be a loss that some learning rate reaches in all runs; at batch size "
            f"{batch}, {finite.sum()} of {finite.size} runs reached it within max_steps = "
            f"{max_steps}, and the lowest loss was {lowest.min():.4g}, at the learning rate "
            f"{rate:.4g} of {rates[0]:.4g} to {rates[-1]:.4g}. Raise the target or "
            f"max_steps; if that rate is the first or the last one, add rates beyond it."
        )
    if len(rates) > 1 and np.all(steps == steps[0]):
        raise ValueError(
            f"make_optimizer must use its learning rate: at batch size {batch} all rates took "
            f"the same steps. (An optimizer_state of optax.inject_hyperparams holds a learning "
            f"rate of its own, which is used instead.)"
        )
