"""Names of optax that this package does not have, with those whose function here does more."""

IN_PLACE_OF = {
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
