"""What it costs to share large matrices between devices, before anything is compiled."""

from collections.abc import Mapping, Sequence
import math

from optax_largebatch.arguments import check_integer
from optax_largebatch.engine.matrices.groups import sharing_plans


def matrix_groups(
    number: int,
    *,
    sides: tuple[int, int],
    axes: Mapping[str, int],
    itemsize: int = 2,
) -> str:
    r"""Says how devices share the matrices of one shape in a step of Muon, as a table to print.

    Where there are fewer matrices than devices, a group of devices may share each matrix: each has
    some columns. They then multiply less and send more. Muon takes the way with the arrow, which a
    model of products and bytes finds the fastest, if `update` knows how parameters are split.

    Products are in units of an even share of all devices, and megabytes are what each device sends
    in a step of five iterations.

    Args:
        number: how many matrices of one shape there are, those of all layers together.
        sides: the two sides of a matrix.
        axes: the number of devices along each mesh axis.
        itemsize: the bytes of an element in the iterations, 2 for `ns_dtype="bfloat16"`.

    Returns:
        The table: a line for each size of a group along each axis.

    Raises:
        ValueError: a number is less than 1.

    Examples:
        >>> from optax_largebatch import matrix_groups
        >>> print(matrix_groups(128, sides=(4096, 4096), axes={"fsdp": 32, "tensor": 2}))
        group of      turns  products  megabytes
        1                 2      1.00        134  <-
        2 of fsdp         4      1.00       1141
        4 of fsdp         8      1.00       3154
        8 of fsdp        16      1.00       7181
        16 of fsdp       32      1.00      15234
        32 of fsdp       64      1.00      31340
        2 of tensor       4      1.00       1141
    """
    check_integer("number", number, at_least=1)
    if not isinstance(sides, Sequence) or len(sides) != 2:
        raise TypeError(f"sides must be two integers, such as (4096, 4096), got {sides!r}.")
    for index, side in enumerate(sides):
        check_integer(f"sides[{index}]", side, at_least=1)
    for name, length in axes.items():
        check_integer(f"axes[{name!r}]", length, at_least=1)
    check_integer("itemsize", itemsize, at_least=1)
    plans = list(sharing_plans(number, (min(sides), max(sides)), axes, itemsize))
    least = min(plans, key=lambda plan: plan.cost)
    of_a_matrix = plans[0].operations / plans[0].matrices_per_group
    share = number * of_a_matrix / math.prod(axes.values())
    lines = ["group of      turns  products  megabytes"]
    for plan in plans:
        name = f"{plan.group.size} of {plan.group.axis}" if plan.group.axis else "1"
        mark = "  <-" if plan is least else ""
        products = plan.operations / share
        sent = plan.bytes / 1e6
        lines.append(f"{name:12} {plan.matrices_per_group:6} {products:9.2f} {sent:10.0f}{mark}")
    return "\n".join(lines)
