"""Names that this package does not have, with those that it has in their place."""

IN_PLACE_OF = {
    # Of version 0.1.0.
    "batch_scale": "macrobatch_size // batch_size",
    "named": "matching",
    "scale_by_learned_matrices": "learned_gradient",
    "Hyperparameters": "TunedRun",
    "ScaledHyperparameters": "BatchPlan",
    "excluding": "~matching",
    "excluding_kinds": "~matching_kinds",
    "scale_hyperparameters": "batch_plan",
    "shard_optimizer_state": "optimizer_state_shardings",
    "SkipNonfiniteState": "states.SkipBadStepsState",
    "SkipSpikesState": "states.SkipBadStepsState",
    "skip_nonfinite": "skip_bad_steps",
    "skip_spikes": "skip_bad_steps",
    "warmup_cosine": "warmup_decay",
    "warmup_hold_decay": "warmup_decay",
    "warmup_polynomial": "warmup_decay",
    # Of optax, where the function here does more.
    "MultiSteps": "accumulate_gradients",
    "apply_if_finite": "skip_bad_steps",
    "centralize": "centralize_gradients",
    "clip": "clip_by_value",
    "polynomial_schedule": "warmup_decay",
    "trace": "accumulate_momentum",
    "cosine_decay_schedule": "warmup_decay",
    "warmup_cosine_decay_schedule": "warmup_decay",
}


def says_unknown(name: str) -> str:
    """What an error says of a name that the package does not have."""
    known = IN_PLACE_OF.get(name, f"states.{name}" if name.endswith("State") else None)
    message = f"module 'optax_largebatch' has no attribute {name!r}"
    return message if known is None else f"{message}; here it is called {known!r}"
