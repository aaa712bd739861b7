"""What a message of an optimizer tells its user to write, and the arguments after that."""

import re
import warnings

import optax_largebatch as lb

PLACES = ("embeddings", "head")
ARGUMENTS = ("stacked", "matrix_axes", "matrix_mask", "adamh_mask", "not_decayed", *PLACES)

LIBRARY = {
    "stacked_layers": dict,  # entries of several messages are put together
    "matching": lb.matching,
    "matching_kinds": lb.matching_kinds,
    "at_least_ndim": lb.at_least_ndim,
}
"""The names that code in a message may have."""

PLACEHOLDER = '"..."'
"""What stands in a message for a pattern that only the user knows."""


def followed(message, arguments, known):
    """The arguments after doing what a message says; None if it says nothing that can be done.

    Code in the message is pasted. If there is none, somebody who knows the network gives what the
    message asks for.

    Args:
        message: the text of an error or of a warning.
        arguments: those that are already given.
        known: the right ones.
    """
    pasted = dict(arguments)
    for name, value in _code(message):
        if isinstance(value, dict):
            pasted[name] = (pasted.get(name) or {}) | value
        elif value is not None or _there_are_none(name, known):
            pasted[name] = value
    if repr(pasted) != repr(arguments):  # rules are equal if they print the same
        return pasted
    asked = {
        name: known[name]
        for name in ARGUMENTS
        if name in known and name not in arguments and _asks_for(name, message)
    }
    return arguments | asked if asked else None


def _there_are_none(name, known):
    """Whether None is the right one of two things to write."""
    return name in PLACES and known.get(name) is None


def _asks_for(name, message):
    return re.search(rf"(?<![a-z_]){name}(=| must be given)", message) is not None


def _code(message):
    """The arguments that stand in a message as code, with their values."""
    places = re.finditer(rf"(?<![a-z_])({'|'.join(ARGUMENTS)})=", message)
    return [(place[1], value) for place in places for value in _value(message[place.end() :])]


def _value(text):
    """The value of the code that a text begins with; none if it begins with no code."""
    ends = [end.end() for end in re.finditer(r"[)}]|None", text)]
    for end in reversed(ends):
        code = text[:end]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                value = eval(code, {"__builtins__": {}}, LIBRARY)
        except Exception:  # this is more than the code
            continue
        return [] if PLACEHOLDER in code else [value]
    return []
