"""Two optimizers are run to see whether their moments mean the same."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optax_largebatch as lb
from optax_largebatch.migration import same_moments
from tests.conftest import slow_but
from tests.migration import switches
from tests.migration.switches import BY_LAYER, CONTRIB, DECAY, MUONH, PARAMS, SCHEDULE, SWITCHES

ADAM, SGD, CLIP = optax.adam(0.1), optax.sgd(0.1, 0.9), optax.clip_by_global_norm(1.0)
LAMB = lb.lamb(0.1, **DECAY)
MOMENTUM = lb.chain(lb.accumulate_momentum(0.9), lb.scale_by_learning_rate(0.1))
BEHIND_THE_RATE = lb.chain(lb.scale_by_learning_rate(0.1), lb.accumulate_momentum(0.9))
CHAINED, RATE, TRACE = optax.clip(100.0), optax.scale(-0.1), optax.trace(0.9)
LARS = optax.lars(SCHEDULE)
QUICK = ("adam to lamb", "hidden to hidden", "adamw to muonh", "clipped muon in our chain")

SAME = SWITCHES | {
    "radam": (optax.radam(0.1), LAMB),
    "nadamw": (optax.nadamw(0.1), LAMB),
    "moments of 16 bits": (optax.adam(0.1, mu_dtype=jnp.bfloat16), LAMB),
    "another number of micro-batches": (
        switches.micro(ADAM),
        lb.accumulate_gradients(LAMB, every=7),
    ),
    "a loss scale": (lb.dynamic_loss_scale(lb.lamb(0.1)), LAMB),
    "clipped muon": (switches.chained(CONTRIB), switches.chained(MUONH)),
    "clipped muon in our chain": (switches.chained(CONTRIB), lb.chain(CLIP, MUONH)),
}
DIFFERENT = {
    "adamax": (optax.adamax(0.1), LAMB),
    "adamaxw": (optax.adamaxw(0.1), LAMB),
    "yogi": (optax.yogi(0.1), LAMB),
    "adopt": (optax.contrib.adopt(0.1), LAMB),
    "sums": (lb.lamb(0.1, grad_averaging=False), LAMB),
    "sums of Muon": (lb.muon(0.1, grad_averaging=False), lb.muon(0.1)),
    "clipping": (ADAM, lb.lamb(0.1, max_grad_norm=1.0)),
    "decay": (optax.chain(optax.add_decayed_weights(0.1), ADAM), LAMB),
    "momentum": (optax.sgd(0.1, 0.8), MOMENTUM),
    "steps for gradients": (BEHIND_THE_RATE, MOMENTUM),
    "gradients for steps": (SGD, BEHIND_THE_RATE),
    "gradients for steps of lars": (SGD, lb.lars(0.1)),
    "gradients for directions": (SGD, lb.larc(0.1)),
    "steps for directions": (LARS, lb.lars(0.1, learning_rate_in_momentum=False)),
    "means": (SGD, lb.chain(lb.accumulate_momentum(0.9, averaging=True), optax.scale(-0.1))),
    "learning rates in the momentum": (optax.lars(0.1), lb.lars(0.2)),
    "sums of micro-batches": (
        optax.MultiSteps(ADAM, 3, use_grad_mean=False),
        switches.accumulated(LAMB),
    ),
}


@pytest.mark.filterwarnings("ignore:what DynamicLossScaleState")
@pytest.mark.parametrize("name", slow_but(QUICK, SAME))
def test_the_same_moments_are_taken_over(name):
    old, new = SAME[name]
    lb.adopt_state(new, PARAMS, old.init(PARAMS), step=0, old_optimizer=old)


@pytest.mark.parametrize("name", DIFFERENT)
def test_moments_that_mean_something_else_are_refused(name):
    """Without the old optimizer nothing in the state tells."""
    old, new = DIFFERENT[name]
    state = old.init(PARAMS)
    has_buffer = switches.sums_gradients(state)
    if not has_buffer:
        lb.adopt_state(new, PARAMS, state, step=0)
    remedy = "optax.sgd and accumulate_mom" if has_buffer else "must be of the same numbers"
    says = rf"old_optimizer must keep the moments .* in step \d.* in old_optimizer .*{remedy}"
    with pytest.raises(ValueError, match=says):
        lb.adopt_state(new, PARAMS, state, step=0, old_optimizer=old)


WINDOWS = {
    "b1": (optax.adam(0.1, b1=0.95), LAMB),
    "b2": (optax.adam(0.1, b2=0.9995), LAMB),
    "beta": (ADAM, lb.muon(0.1)),
    "beta of both": (optax.contrib.muon(0.1), lb.muonh(0.1, beta=0.7, b2=0.95)),
    "of complex numbers": (ADAM, lb.lamb(0.1, b1=0.8)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_an_average_over_another_window_stays_the_same_average(name):
    """Of one gradient again and again it is the gradient, after its bias correction."""
    old, new = WINDOWS[name]
    params = PARAMS
    if name == "of complex numbers":
        params = jax.tree.map(lambda x: jnp.asarray(x, "complex64") * (1 + 2j), PARAMS)
    state, expected = old.init(params), new.init(params)
    for _ in range(4):
        _, state = old.update(params, state, params)
        _, expected = new.update(params, expected, params)
    adopted = lb.adopt_state(new, params, state, old_optimizer=old)
    for field in ("mu", "nu"):
        found, wanted = (optax.tree.get_all_with_path(x, field) for x in (adopted, expected))
        chex.assert_trees_all_close([x for _, x in found], [x for _, x in wanted], rtol=1e-3)


def test_a_plan_takes_over_the_run_that_it_was_tuned_by():
    """Its law has moved the momenta: `docs/guides/from_adamw_to_16k.md` says that one can."""
    run = lb.TunedRun("adamw", batch_size=512, total=51_200, learning_rate=3e-4, weight_decay=0.1)
    plan = lb.batch_plan(16_384, total=76_800, run=run.to("muonh"))
    optimizer = lb.planned_optimizer(plan, PARAMS, embeddings=None, head=None)
    adamw = optax.adamw(3e-4)
    state = switches.state_after(adamw, 3)
    adopted = lb.adopt_state(optimizer, PARAMS, state, old_optimizer=adamw)
    moments = [x for _, x in optax.tree.get_all_with_path(adopted, "mu")]
    (momentum,) = (x["kernel"] for x in moments if hasattr(x["kernel"], "shape"))
    assert jnp.allclose(momentum, PARAMS["kernel"] * (1 - 0.7**3), rtol=1e-4)


def test_large_parameters_of_any_precision_are_compared_as_small_ones():
    """Neither their size nor bfloat16 hides that Yogi's moments are not Adam's."""
    params = {"kernel": jnp.ones((3, 512, 0, 7), jnp.bfloat16), "scale": jnp.ones((), jnp.float16)}
    lb.adopt_state(LAMB, params, ADAM.init(params), old_optimizer=ADAM)
    with pytest.raises(ValueError, match="of nu of 'scale'"):
        lb.adopt_state(LAMB, params, optax.yogi(0.1).init(params), old_optimizer=optax.yogi(0.1))


def test_another_optimizer_than_that_of_the_state_is_refused():
    says = "must be the optimizer that state is of: of 'bias' it keeps {}, and state has moments of"
    with pytest.raises(ValueError, match=says.format("a momentum buffer")):
        lb.adopt_state(LAMB, PARAMS, switches.state_after(ADAM), old_optimizer=SGD)
    with pytest.raises(ValueError, match=says.format("no moments")):
        lb.adopt_state(
            LAMB, PARAMS, switches.state_after(ADAM), old_optimizer=switches.without_bias(ADAM)
        )


def test_short_parameters_look_like_no_stacks():
    """The first axes of the real ones have several lengths, so they are no layers of one stack."""
    params = {"conv": jnp.ones((3, 5, 4)), "table": jnp.ones((7, 5))}
    optimizer = lb.muonh(0.1, matrix_mask=lb.matching("table"), beta=0.9, b2=0.999)
    lb.adopt_state(optimizer, params, ADAM.init(params), old_optimizer=ADAM)


def test_an_optimizer_that_cannot_take_a_step_says_so():
    wants_more = optax.chain(ADAM, optax.contrib.reduce_on_plateau())
    with pytest.raises(ValueError, match=r"old_optimizer could not take a step .* 'value'"):
        lb.adopt_state(LAMB, PARAMS, wants_more.init(PARAMS), old_optimizer=wants_more)
    inner = switches.accumulated(LAMB)
    leaves_out = optax.conditionally_mask(inner, lambda call: call % 2 == 0)
    with pytest.raises(ValueError, match=r"optimizer could not .* leaves a micro-batch out"):
        lb.adopt_state(leaves_out, PARAMS, ADAM.init(PARAMS), old_optimizer=ADAM)


BUFFERS = {
    "sgd": (optax.sgd(0.1, 0.9), MOMENTUM),
    "a rate in the training loop": (optax.chain(CHAINED, TRACE), MOMENTUM),
    "trace behind the rate": (optax.chain(RATE, TRACE), BEHIND_THE_RATE),
    "two links behind the rate": (optax.chain(RATE, TRACE, CHAINED), BEHIND_THE_RATE),
    "lars in a chain": (optax.chain(CHAINED, LARS), lb.lars(SCHEDULE)),
    "each for its own parameter": (
        optax.partition({"a": SGD, "b": SGD}, {"kernel": "a", "bias": "b"}),
        BY_LAYER,
    ),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_with_the_same_sum_is_taken_over(name):
    old, new = BUFFERS[name]
    state = switches.state_after(old)
    adopted = lb.adopt_state(new, PARAMS, state, step=2, old_optimizer=old)
    traces = (optax.tree.get_all_with_path(tree, "trace") for tree in (adopted, state))
    found, known = ({id(x) for _, trace in of for x in jax.tree.leaves(trace)} for of in traces)
    assert found == known


def test_a_buffer_alone_does_not_say_what_it_sums():
    with pytest.raises(ValueError, match=r"old_optimizer must be given, .*old_optimizer=optax.sgd"):
        lb.adopt_state(MOMENTUM, PARAMS, switches.state_after(SGD), step=2)


def test_a_text_that_cuts_an_axis(monkeypatch):
    params = {"kernel": jnp.ones((4, 9))}
    new = lb.lamb(0.1, stacked={"kernel": "rows columns=4+4+1"})
    lb.adopt_state(new, params, ADAM.init(params), old_optimizer=ADAM)
    monkeypatch.setattr(same_moments, "_MOST", 35)
    with pytest.raises(ValueError, match=r"optimizer could not take a step .* for an axis of 3"):
        lb.adopt_state(new, params, ADAM.init(params), old_optimizer=ADAM)


def test_what_begins_anew_is_not_compared():
    """And may be of another kind; the rest is compared."""
    begins = {"forget": lb.matching("kernel")}
    muonh, sums = lb.muonh(0.1, b2=0.999), lb.lamb(0.1, grad_averaging=False)
    state = switches.state_after(muonh)
    adam, *_ = lb.adopt_state(ADAM, PARAMS, state, old_optimizer=muonh, **begins)
    assert not adam.mu["kernel"].any()
    chex.assert_trees_all_close(adam.mu["bias"], PARAMS["bias"] * (1 - 0.9**2))
    with pytest.raises(ValueError, match="an element of mu of 'bias'"):
        lb.adopt_state(LAMB, PARAMS, switches.state_after(sums), old_optimizer=sums, **begins)
