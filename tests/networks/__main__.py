"""Prints what becomes of each network with each optimizer: `python -m tests.networks`.

Below a network stands what is wrong with it.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.networks.network import NAMES, OPTIMIZERS, Network
from tests.networks.verdicts import verdict

WIDTH = 12


def main():
    """Prints the table."""
    print(_line("", [name.removesuffix("_optimizer") for name in OPTIMIZERS]))
    for name in NAMES:
        network = Network(name)
        verdicts = {optimizer: verdict(network, optimizer) for optimizer in OPTIMIZERS}
        print(_line(name, [each.kind for each in verdicts.values()]), flush=True)
        for optimizer, each in verdicts.items():
            if not each.is_good:
                text = "\n".join(line[: WIDTH * 12] for line in each.why.splitlines())
                print(f"{optimizer}: {text}".replace("\n", "\n  "))


def _line(name, cells):
    return f"{name:<26}" + "".join(f"{cell!s:<{WIDTH}}" for cell in cells)


if __name__ == "__main__":
    main()
