"""The colour of each optimizer, the same in every picture, so that pictures can be compared.

Colour-blind readers can tell any two apart.
"""

COLOURS = {
    "adamw": "#000000",
    "lamb": "#0072B2",
    "lans": "#D55E00",
    "muon": "#009E73",
    "muonh": "#CC79A7",
    "adamh": "#E69F00",
    "lars": "#56B4E9",
    "nadamw": "#882255",
    "sgd": "#332288",
    "larc": "#B2182B",
    "lbsgd": "#DDCC77",
    "eve": "#5AAE61",
    "cain": "#003C30",
    "scaled_adam": "#C51B7D",
    "learned_gradient": "#661100",
}
"""The optimizers that are most often drawn together have the colours of Okabe and Ito."""

GREY = "#C8C8C8"
"""What is in a picture for comparison only."""
