"""The optimizers of the peers as formulas: NumPy, float64, one function for each family.

Each function follows one leaf and yields it after every step; `trajectory` runs all leaves of a
network. `lr` and `wd` are numbers or tables with one value for each step, and a switch that is
different from leaf to leaf is a function of the leaf's name. The numbering of steps is the
peers': `t` counts from 1, the tables of values from 0.
"""

import numpy as np

ANY = (0.0, np.inf)


def trajectory(
    family,
    weights,
    gradients,
    *,
    centralized=lambda name: False,
    **switches,
):
    """The weights after each step, from gradients with the steps on their first axis."""

    def leaf(name):
        own = {key: value(name) if callable(value) else value for key, value in switches.items()}
        own_gradients = centralize(gradients[name]) if centralized(name) else gradients[name]
        return family(weights[name], own_gradients, **own)

    return {name: np.stack(list(leaf(name))) for name in weights}


def clip_by_global_norm(gradients, bound):
    """The gradients of each step over `max(1, n / bound)`, `n` their norm over all leaves."""
    squares = [(g.reshape(len(g), -1) ** 2).sum(axis=1) for g in gradients.values()]
    divisor = np.maximum(1, np.sqrt(sum(squares)) / bound)
    return {name: (g.T / divisor).T for name, g in gradients.items()}


def centralize(gradients):
    """The gradients of all steps without their mean over all axes of the leaf but the first."""
    axes = tuple(range(2, gradients.ndim))
    return gradients - gradients.mean(axis=axes, keepdims=True) if axes else gradients


def lamb(
    w,
    gradients,
    *,
    lr,
    wd=0.0,
    eps=1e-6,
    eps_in_root=0.0,
    betas=(0.9, 0.999),
    correction="moments",
    b3=None,
    decay="direction",
    clip=np.inf,
    adapted=True,
    bounds=ANY,
    ratio_bounds=ANY,
    ratio_eps=0.0,
):
    """LAMB; `decay` says what is decayed: the direction, the gradient, or first the weights."""
    b1, b2 = betas
    b3 = 1 - b1 if b3 is None else b3
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g, eta, lam in _steps(gradients, lr, wd):
        bc1, bc2 = (1 - b1**t, 1 - b2**t) if correction == "moments" else (1, 1)
        if correction == "step size":
            eta *= np.sqrt(1 - b2**t) / (1 - b1**t)
        if decay == "weights":
            w = (1 - eta * lam) * w
        g = np.clip(g, -clip, clip) + (lam * w if decay == "gradient" else 0)
        m = b1 * m + b3 * g
        v = b2 * v + (1 - b2) * g**2
        u = (m / bc1) / (np.sqrt(v / bc2 + eps_in_root) + eps)
        u = u + (lam * w if decay == "direction" else 0)
        r = _ratio(np.clip(_norm(w), *bounds), _norm(u), ratio_eps, ratio_bounds) if adapted else 1
        w = w - eta * r * u
        yield w


def adamh(w, gradients, *, lr, wd=0.0, on_sphere):
    """AdamH, and Adam at 3/13 of its rate. There is no decay."""
    b1, b2, eps = 0.9, 0.95, 1e-8
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g, eta, _ in _steps(gradients, lr, wd):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = _turned(w, u, eta) if on_sphere else w - 3 / 13 * eta * u
        yield w


def muonh(w, gradients, *, lr, wd=0.0, on_sphere):
    """MuonH of matrices with Jordan's coefficients; Adam at 3/13 of the rate moves the rest."""
    if not on_sphere:
        yield from adamh(w, gradients, lr=lr, on_sphere=False)
        return
    directions = orthogonalized(gradients)
    for (_, _, eta, _), direction in zip(_steps(gradients, lr, wd), directions, strict=True):
        w = _turned(w, direction, eta)
        yield w


def orthogonalized(gradients):
    """The directions of Muon with Jordan's coefficients, for one matrix."""
    beta, m = 0.95, np.zeros_like(gradients[0])
    for t, g, _, _ in _steps(gradients, 0.0, 0.0):
        m = beta * m + (1 - beta) * g
        x = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        x = x / (_norm(x) + 1e-8)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        yield x


def lans(
    w,
    gradients,
    *,
    lr,
    wd=0.0,
    normalized=True,
    norm_eps=0.0,
    clip=np.inf,
    corrected=True,
    b3=0.1,
    decay="direction",
    sequential=False,
    bounds=ANY,
):
    """LANS; `decay` as in `lamb`. A gradient that is zero stays zero."""
    b1, b2, eps = 0.9, 0.999, 1e-6
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, g, eta, lam in _steps(gradients, lr, wd):
        bc1, bc2 = (1 - b1**t, 1 - b2**t) if corrected else (1, 1)
        x = g / (_norm(g) + norm_eps) if normalized and g.any() else g
        x = np.clip(x, -clip, clip) + (lam * w if decay == "gradient" else 0)
        m = b1 * m + b3 * x
        v = b2 * v + (1 - b2) * x**2
        d = np.sqrt(v / bc2) + eps
        lam = lam if decay == "direction" else 0
        r = np.clip(_norm(w), *bounds)
        u = (m / bc1) / d + lam * w
        half_way = w - eta * b1 * _ratio(r, _norm(u)) * u
        c = x / d + lam * (half_way if sequential else w)
        w = half_way - eta * b3 * _ratio(r, _norm(c)) * c
        yield w


def lars(
    w,
    gradients,
    *,
    lr,
    wd=0.0,
    eta=0.001,
    eps=0.0,
    of_update=False,
    scaled_momentum=True,
    nesterov=False,
    dampening=0.0,
    clip=np.inf,
    adapted=True,
    at_most_sgd=False,
):
    """LARS; `of_update` puts `||g + wd*w||` under the ratio, in place of `||g|| + wd*||w||`."""
    mu = 0.9
    buffer = np.zeros_like(w)
    for t, g, rate, lam in _steps(gradients, lr, wd):
        length = _norm(g + lam * w) if of_update else _norm(g)
        extra = eps if of_update else lam * _norm(w) + eps
        r = _ratio(eta * _norm(w), length, extra) if adapted else 1
        r = min(r / rate, 1) if at_most_sgd else r
        step = r * (np.clip(g, -clip, clip) + lam * w) * (rate if scaled_momentum else 1)
        buffer = mu * buffer + (1 if t == 1 else 1 - dampening) * step
        step = step + mu * buffer if nesterov else buffer
        w = w - step * (1 if scaled_momentum else rate)
        yield w


def lars_of_buffer(
    w,
    gradients,
    *,
    lr,
    wd=0.0,
    nesterov=False,
    adapted=True,
):
    """LARS whose ratio has the length of the direction that comes out of the momentum buffer."""
    mu, eta = 0.9, 0.001
    buffer = np.zeros_like(w)
    for _, g, rate, lam in _steps(gradients, lr, wd):
        buffer = mu * buffer + g + lam * w
        direction = g + lam * w + mu * buffer if nesterov else buffer
        w = w - rate * (_ratio(eta * _norm(w), _norm(direction)) if adapted else 1) * direction
        yield w


def larc(
    w,
    gradients,
    *,
    lr,
    wd=0.0,
    clip=True,
    trust=0.02,
    nesterov=False,
    dampening=0.0,
    adapted=True,
):
    """Apex's LARC in front of SGD with momentum: no ratio and no decay where a norm is zero."""
    mu, eps = 0.9, 1e-8
    buffer = np.zeros_like(w)
    for t, g, rate, lam in _steps(gradients, lr, wd):
        if adapted and _norm(w) > 0 and _norm(g) > 0:
            r = trust * _norm(w) / (_norm(g) + lam * _norm(w) + eps)
            r = min(r / rate, 1) if clip else r
            g = r * (g + lam * w)
        buffer = mu * buffer + (1 if t == 1 else 1 - dampening) * g
        w = w - rate * (g + mu * buffer if nesterov else buffer)
        yield w


def lbsgd(
    w,
    gradients,
    *,
    lr,
    wd=0.0,
    mu=0.9,
    scale,
    strategy,
    warmup,
    begin=0,
    clip=np.inf,
):
    """LBSGD; the steps are micro-batches, and the tables `lr` and `wd` count macro-batches."""
    total, buffer = np.zeros_like(w), np.zeros_like(w)
    rates, decays = np.broadcast_to(lr, len(gradients)), np.broadcast_to(wd, len(gradients))
    macro = 0
    for c, micro in enumerate(gradients, start=begin + 1):
        total = total + micro
        if c % scale == 0:
            g, total = total / scale, np.zeros_like(w)
            lam = decays[macro]
            if strategy == "lars":
                squares = _norm(g) ** 2 + lam * _norm(w) ** 2 + 1e-18
                multiplier = np.clip(np.sqrt(_norm(w) ** 2 / squares), 0.01, 100)
            else:
                multiplier = _warmup(strategy, scale, c, warmup)
            step = np.clip(g, -clip, clip) + lam * w
            buffer = mu * buffer - rates[macro] * multiplier * step
            w = w + buffer
            macro += 1
        yield w


def _warmup(strategy, scale, c, warmup):
    if c >= warmup:
        return scale
    if warmup <= 1:
        return 1
    grown = {"linear": c / warmup, "power2": (c / warmup) ** 2, "sqrt": np.sqrt(c / warmup)}
    return 1 + (scale - 1) * grown[strategy]


def _steps(gradients, lr, wd):
    """`(t, gradient, learning rate, weight decay)` of each step."""
    rates, decays = np.broadcast_to(lr, len(gradients)), np.broadcast_to(wd, len(gradients))
    ts = range(1, len(gradients) + 1)
    return zip(ts, gradients, rates, decays, strict=True)


def _norm(x):
    return np.sqrt((x**2).sum())


def _ratio(above, below, extra=0.0, bounds=ANY):
    """`above / (below + extra)` within bounds, and 1 where one of the two norms is zero."""
    return np.clip(above / (below + extra), *bounds) if above > 0 and below > 0 else 1.0


def _turned(w, u, eta):
    """A step on the sphere of `w`."""
    moved = w - eta * _norm(w) / _norm(u) * u
    return _norm(w) / _norm(moved) * moved
