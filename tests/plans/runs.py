"""The run with AdamW that plans are made of."""

import optax_largebatch as lb


def tuned(learning_rate=0.1, batch_size=8, total=1000, **numbers):
    return lb.TunedRun(
        "adamw", batch_size=batch_size, total=total, learning_rate=learning_rate, **numbers
    )
