"""Draws the chain of each optimizer: the links are read from its source, the equations are here.

python docs/draw_chains.py
"""

import ast
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

DOCS = Path(__file__).parent
SOURCES = DOCS.parent / "optax_largebatch" / "optimizers"

RATE = r"$u \leftarrow -\eta\, u$"
DECAY = r"$u \leftarrow u + \lambda w$"
ADAM = (
    r"$m_t = b_1 m_{t-1} + (1 - b_1)\, g_t$",
    r"$v_t = b_2 v_{t-1} + (1 - b_2)\, g_t^2$",
    r"$u = \dfrac{m_t / (1 - b_1^t)}{\sqrt{v_t / (1 - b_2^t)} + \epsilon}$",
)
MOMENTUM = r"$b_t = \mu\, b_{t-1} + u$"
MOMENTUM_OF_STEPS = r"$\Delta_t = b_1 \Delta_{t-1} + (1 - b_1)\, D$"
ORTHOGONAL = (
    r"$m_t = \beta\, m_{t-1} + (1 - \beta)\, g_t$",
    r"$d = \dfrac{\beta\, m_t}{1 - \beta^{t+1}} + \dfrac{(1 - \beta)\, g_t}{1 - \beta^t}$",
    r"$X = d \; / \; \Vert d \Vert$, and five times:",
    r"$X \leftarrow a X + (b\, X X^\top + c\, (X X^\top)^2)\, X$",
)
HYPERBALL = (
    r"$w' = w - \eta\, \dfrac{\Vert w \Vert}{\Vert u \Vert}\, u$",
    r"$u \leftarrow \dfrac{\Vert w \Vert}{\Vert w' \Vert}\, w' - w$",
)
APPLY = r"$w \leftarrow w + u$"
APPLY_MOMENTUM = r"$w \leftarrow w + b_t$"
APPLY_STEPS = r"$w \leftarrow w + \Delta_t$"

EQUATIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "lamb": {
        "clip_by_global_norm": (r"$g \leftarrow g \; / \; \max(1, \Vert g_{all} \Vert / n)$",),
        "scale_by_adam": ADAM,
        "add_decayed_weights": (DECAY,),
        "scale_by_trust_ratio": (r"$u \leftarrow \dfrac{\phi(\Vert w \Vert)}{\Vert u \Vert}\, u$",),
        "scale_by_learning_rate": (RATE,),
        "apply_updates": (APPLY,),
    },
    "lans": {
        "normalize_by_block_norm": (r"$\tilde g = g \; / \; \Vert g \Vert$",),
        "nesterov_split": (
            r"$m_t = b_1 m_{t-1} + (1 - b_1)\, \tilde g_t$",
            r"$v_t = b_2 v_{t-1} + (1 - b_2)\, \tilde g_t^2$",
            r"$d = \sqrt{v_t / (1 - b_2^t)} + \epsilon$",
            r"$u = b_1\, f\left(\dfrac{m_t / (1 - b_1^t)}{d}\right)"
            r" + (1 - b_1)\, f\left(\dfrac{\tilde g_t}{d}\right)$",
            r"with $f(x)$:",
        ),
        "add_decayed_weights": (r"$x \leftarrow x + \lambda w$",),
        "scale_by_trust_ratio": (r"$x \leftarrow \dfrac{\phi(\Vert w \Vert)}{\Vert x \Vert}\, x$",),
        "scale_by_learning_rate": (RATE,),
        "apply_updates": (APPLY,),
    },
    "lars": {
        "scale_by_lars": (
            r"$r = \eta_{trust} \dfrac{\Vert w \Vert}"
            r"{\Vert g \Vert + \lambda \Vert w \Vert + \epsilon}$",
            r"$u = r\, (g + \lambda w)$",
        ),
        "scale_by_learning_rate": (RATE,),
        "accumulate_momentum": (MOMENTUM,),
        "apply_updates": (APPLY_MOMENTUM,),
    },
    "larc": {
        "scale_by_lars": (
            r"$r = \min \left( \dfrac{\eta_{trust}}{\eta} \dfrac{\Vert w \Vert}"
            r"{\Vert g \Vert + \lambda \Vert w \Vert + \epsilon}, 1 \right)$",
            r"$u = r\, (g + \lambda w)$",
        ),
        "accumulate_momentum": (MOMENTUM,),
        "scale_by_learning_rate": (r"$u \leftarrow -\eta\, b_t$",),
        "apply_updates": (APPLY,),
    },
    "lbsgd": {
        "count_micro_batches": (r"$c \leftarrow c + 1$",),
        "accumulate_gradients": (
            r"$g = \dfrac{1}{S} \sum_{i=1}^{S} g_i$",
            "and then, once for each macro-batch:",
        ),
        "scale_by_lars": (
            r"$u = M\, (g + \lambda w)$",
            r"strategy lars: $M = \sqrt{\dfrac{\Vert w \Vert^2}"
            r"{\Vert g \Vert^2 + \lambda \Vert w \Vert^2}}$",
            r"within 0.01 and 100, else $M = 1$",
        ),
        "scale_by_warmed_up_rate": (
            r"$u \leftarrow -\eta\, M(c)\, u$",
            r"strategy lars: $M(c) = 1$",
        ),
        "accumulate_momentum": (MOMENTUM,),
        "apply_updates": (APPLY_MOMENTUM,),
    },
    "muon": {
        "orthogonalize_momentum": ORTHOGONAL,
        "scale_by_matrix_shape": (
            r"$u = \sqrt{\max(1, n_{columns} / n_{rows})}\; X$",
            r"or $u = 0.2\, \sqrt{\max(n_{rows}, n_{columns})}\; X$",
        ),
        "add_decayed_weights": (DECAY,),
        "scale_by_learning_rate": (RATE,),
        "apply_updates": (APPLY,),
    },
    "muonh": {
        "orthogonalize_momentum": ORTHOGONAL,
        "hyperball": HYPERBALL,
        "apply_updates": (APPLY,),
    },
    "adamh": {
        "scale_by_adam": ADAM,
        "hyperball": HYPERBALL,
        "apply_updates": (APPLY,),
    },
    "eve": {
        "scale_by_adam": ADAM,
        "scale_by_learning_rate": (RATE,),
        "decay_to_target_rms": (
            r"$u \leftarrow u - \lambda w$",
            r"where $\mathrm{rms}(w) > \rho$",
        ),
        "apply_updates": (APPLY,),
    },
    "cain": {
        "sum_of": (r"$D =$ the sum of",),
        "scale_by_second_moment": (
            r"$v_t = b_2 v_{t-1} + (1 - b_2)\, g_t^2$",
            r"$x = (1 - b_2^{t-1}) \dfrac{g_t}{\sqrt{v_t} + \epsilon}$",
        ),
        "scale_by_factored_parameter_rms": (r"$x \leftarrow R_t\, x$",),
        "scale_by_learning_rate": (r"$x \leftarrow -\eta\, x$",),
        "learn_log_scale": (
            r"$s_t = \sum w\, g, \quad q_t = b_2 q_{t-1} + (1 - b_2)\, s_t^2$",
            r"$x = -\eta \gamma \sqrt{1 - b_2^t} \dfrac{s_t}{\sqrt{q_t} + \epsilon}\, w$",
        ),
        "accumulate_momentum": (MOMENTUM_OF_STEPS,),
        "clamp_parameters": (r"every 10 steps: $w + \Delta_t$ within $\pm$ the bound",),
        "apply_updates": (APPLY_STEPS,),
    },
    "scaled_adam": {
        "clip_by_median_norm": (
            r"$g \leftarrow \min(1, \, k \cdot \mathrm{median} / \mathrm{norm})\, g$",
        ),
        "sum_of": (r"$D =$ the sum of",),
        "scale_by_second_moment": (
            r"$v_t = b_2 v_{t-1} + (1 - b_2)\, g_t^2$",
            r"$x = \dfrac{g_t}{\sqrt{v_t / (1 - b_2^t)} + \epsilon}$",
        ),
        "scale_by_parameter_rms": (r"$x \leftarrow \max(\mathrm{rms}(w), r_{min})\, x$",),
        "scale_by_learning_rate": (r"$x \leftarrow -\eta\, x$",),
        "learn_log_scale": (r"$x = \sigma_t w$, every $T$ steps",),
        "accumulate_momentum": (MOMENTUM_OF_STEPS,),
        "clamp_parameters": (r"single numbers: $w + \Delta_t$ within $\pm$ the bound",),
        "apply_updates": (APPLY_STEPS,),
    },
    "learned_gradient": {
        "sum_of": (r"$D =$ the sum of",),
        "scale_by_learned_matrices": (
            r"$m_t = b_1 m_{t-1} + (1 - b_1)\, g_t$",
            r"$d = (\times)_k L_k m_t, \quad \rho = \mathrm{rms}(d)$",
            r"$x = \dfrac{1 - b_1}{\sqrt{1 - b_1^2}}"
            r" \dfrac{\min(\max(d, -c\rho), c\rho)}{\rho}$",
        ),
        "scale_by_parameter_rms": (r"$x \leftarrow \max(\mathrm{rms}(w), r_{min})\, x$",),
        "scale_by_learning_rate": (r"$x \leftarrow -\eta\, x$",),
        "learn_log_scale": (r"$x = \sigma_t w$, every $T$ steps",),
        "apply_updates": (r"$w \leftarrow w + D$",),
    },
}
"""What each link of each optimizer does, in the symbols of its page, and then `optax`."""


class Link(NamedTuple):
    """A call in a chain: its name, whether it does nothing by default, and what is inside it."""

    name: str
    optional: bool
    branches: tuple[tuple["Link", ...], ...]


def read_chain(optimizer: str) -> tuple[Link, ...]:
    """The links that an optimizer returns, from its source."""
    for path in SOURCES.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == optimizer:
                return _Reader(node).links_of(node.body[-1].value)  # type: ignore[attr-defined]
    raise ValueError(f"optimizer must be a function in {SOURCES}, got {optimizer!r}.")


NONE_IS_A_CHOICE = ("scale_by_matrix_shape",)
"""Links whose first argument may be None and which do something then."""


class _Reader:
    """Reads the chain of one function, with its arguments at their defaults."""

    def __init__(self, function: ast.FunctionDef):
        own = function.args
        positional = own.args[len(own.args) - len(own.defaults) :]
        columns = (positional, own.defaults), (own.kwonlyargs, own.kw_defaults)
        given = [pair for column in columns for pair in zip(*column, strict=True)]
        self.defaults = {
            name.arg: value.value for name, value in given if isinstance(value, ast.Constant)
        }
        self.assigned = {
            statement.targets[0].id: statement.value
            for statement in function.body
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        }

    def links_of(self, node: ast.expr) -> tuple[Link, ...]:
        """The links of `chain(...)`, of another call, or of what was assigned to a name."""
        if isinstance(node, ast.Name):
            return self.links_of(self.assigned[node.id])
        if isinstance(node, ast.Starred):
            return self.links_of(node.value)
        if isinstance(node, ast.IfExp):
            chosen = eval(ast.unparse(node.test), dict(self.defaults))
            return self.links_of(node.body if chosen else node.orelse)
        if isinstance(node, ast.Tuple):
            return tuple(link for one in node.elts for link in self.links_of(one))
        assert isinstance(node, ast.Call), ast.dump(node)
        if ast.unparse(node.func) == "partition":
            _, optimizers, *_ = node.args
            if isinstance(optimizers, ast.Name):
                optimizers = self.assigned[optimizers.id]
            assert isinstance(optimizers, ast.Dict)
            return self.links_of(optimizers.values[0])  # the optimizer is named for the first
        assert isinstance(node.func, ast.Name), ast.dump(node)
        if node.func.id == "chain":
            return tuple(link for one in node.args for link in self.links_of(one))
        inside = tuple(self.links_of(one) for one in node.args if self._is_link(one))
        off = self._selects_nothing(node)
        if node.args and node.func.id not in NONE_IS_A_CHOICE:
            off |= self._is_off(node.args[0])
        return (Link(node.func.id, off, inside),)

    def _is_link(self, node: ast.expr) -> bool:
        """Whether a call in the arguments of a call is a part of the chain."""
        own = ("chain", *(name for links in EQUATIONS.values() for name in links))
        return isinstance(node, ast.Call) and getattr(node.func, "id", None) in own

    def _selects_nothing(self, call: ast.Call) -> bool:
        """Whether a mask is a function that returns False, by default."""
        chosen = [x.value for x in call.keywords]
        for node in chosen:
            if isinstance(node, ast.IfExp) and isinstance(node.test, ast.Name):
                chosen.append(node.body if self.defaults.get(node.test.id) else node.orelse)
            elif isinstance(node, ast.Lambda) and ast.unparse(node.body) == "False":
                return True
        return False

    def _is_off(self, node: ast.expr) -> bool:
        """Whether the first argument of a link is None by default."""
        return isinstance(node, ast.Name) and self.defaults.get(node.id, 0) is None


def names(links: tuple[Link, ...]) -> list[str]:
    """All links of a chain, those inside of others too, from the first to the last."""
    return [
        name
        for link in links
        for name in (link.name, *(inner for branch in link.branches for inner in names(branch)))
    ]


WIDTH = 4.6  # inches, of 72 points: no wider than a telephone
INK, SOFT, FRAME, BOX, PAGE = "#1b1f24", "#57606a", "#8c959f", "#eef4fb", "#ffffff"
TITLE, LINE, FRACTION, PAD, GAP = 0.26, 0.3, 0.54, 0.08, 0.2


class _Picture:
    """Boxes from top to bottom, measured in inches; `top` is where the next one begins."""

    def __init__(self) -> None:
        self.top = 0.0
        self.items: list[tuple[Any, ...]] = []

    def text(self, x: float, words: str, height: float, **style: Any) -> None:
        self.items.append(("text", x, self.top + height / 2, words, style))
        self.top += height

    def arrow(self) -> None:
        self.items.append(("arrow", self.top, self.top + GAP))
        self.top += GAP

    def link(self, link: Link, equations: dict[str, tuple[str, ...]], indent: float) -> None:
        begin = self.top
        self.top += PAD
        style = {"family": "monospace", "color": SOFT if link.optional else INK, "size": 9}
        off = "  (off by default)" if link.optional else ""
        self.text(indent + 0.12, link.name + off, TITLE, **style)
        for words in equations[link.name]:
            self.text(indent + 0.24, words, FRACTION if "dfrac" in words else LINE, size=11)
        for index, branch in enumerate(link.branches):
            if index:
                self.text(WIDTH / 2, "+", 0.26, size=14, ha="center")
            for step, inner in enumerate(branch):
                if step:
                    self.arrow()
                self.link(inner, equations, indent + 0.16)
        self.top += PAD
        fill = PAGE if link.branches or link.optional else BOX
        self.items.insert(0, ("box", indent, begin, self.top, link.optional, fill))

    def figure(self) -> Figure:
        figure = Figure(figsize=(WIDTH, self.top))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(self.top, 0))
        axes.set_axis_off()
        # The frames of wrappers were put in front of what they hold; the outermost comes first.
        for kind, *item in self.items:
            if kind == "box":
                indent, begin, end, optional, fill = item
                axes.add_patch(
                    FancyBboxPatch(
                        (indent + 0.03, begin + 0.01),
                        WIDTH - 2 * indent - 0.06,
                        end - begin - 0.02,
                        boxstyle="round,pad=0,rounding_size=0.06",
                        edgecolor=FRAME,
                        facecolor=fill,
                        linestyle="--" if optional else "-",
                        linewidth=0.8,
                    )
                )
            elif kind == "arrow":
                begin, end = item
                axes.annotate(
                    "",
                    xy=(WIDTH / 2, end),
                    xytext=(WIDTH / 2, begin),
                    arrowprops={"arrowstyle": "-|>", "color": SOFT, "shrinkA": 0, "shrinkB": 0},
                )
            else:
                x, y, words, style = item
                axes.text(x, y, words, **({"va": "center", "color": INK} | style))
        return figure


def draw(optimizer: str) -> Figure:
    """The picture of an optimizer: its links from the gradient to the new parameters."""
    picture = _Picture()
    picture.text(WIDTH / 2, "gradient $g$, parameters $w$", 0.28, size=11, ha="center")
    for link in read_chain(optimizer):
        picture.arrow()
        picture.link(link, EQUATIONS[optimizer], 0.0)
    picture.arrow()
    (last,) = EQUATIONS[optimizer]["apply_updates"]
    picture.text(WIDTH / 2, last, LINE, size=11, ha="center")
    return picture.figure()


def draw_all(directory: Path) -> None:
    """One file for each optimizer."""
    directory.mkdir(exist_ok=True)
    settings = {"mathtext.fontset": "cm", "svg.hashsalt": "chains", "font.family": "sans-serif"}
    with mpl.rc_context(settings):
        for optimizer in EQUATIONS:
            draw(optimizer).savefig(
                directory / f"{optimizer}.svg", facecolor=PAGE, metadata={"Date": None}
            )


if __name__ == "__main__":
    draw_all(DOCS / "chains")
