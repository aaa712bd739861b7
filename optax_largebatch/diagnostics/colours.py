"""The colours of all pictures. An optimizer has one of its own, the same wherever it is drawn."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""The colours of Okabe and Ito, which colour-blind readers can tell apart."""

OF_OPTIMIZERS = {
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
"""The optimizers that are most often drawn together have those of Okabe and Ito."""

GREY = "#C8C8C8"
"""What is in a picture for comparison only."""
