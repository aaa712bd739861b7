"""Data for a masked language model: sequences of bytes, some of which it has to guess."""

import hashlib
import math
from pathlib import Path
import sysconfig
from typing import NamedTuple

import numpy as np

from bert import MASK


class Batch(NamedTuple):
    """The input of the network, the positions to guess, and the right answers."""

    tokens: np.ndarray  # (..., sequences, length)
    positions: np.ndarray  # (..., sequences, asked)
    answers: np.ndarray  # (..., sequences, asked)


def read_text(folder: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the text files below a folder, each text once, and a sixteenth held out.

    Without a folder it reads the modules of Python's standard library. All of it is kept in memory.
    """
    root = folder or Path(sysconfig.get_path("stdlib"))
    left_out = set() if folder else {"site-packages", "test", "tests"}
    paths = [
        path
        for path in root.rglob("*" if folder else "*.py")
        if path.is_file() and not left_out & set(path.relative_to(root).parts)
    ]
    texts = {hashlib.sha256(text).digest(): text for text in map(Path.read_bytes, paths)}
    # By hash: as good as shuffled, and the same every time. A file with a zero byte is no text.
    in_order = (text for _, text in sorted(texts.items()) if b"\0" not in text)
    everything = np.frombuffer(b"\n".join(in_order), np.uint8)
    training, held_out = np.split(everything, [len(everything) * 15 // 16])
    return training, held_out


def sample(text: np.ndarray, shape: tuple[int, ...], length: int, *seed: int) -> Batch:
    """Sequences from anywhere in a text; the seed alone decides which ones.

    The network has to guess 15% of the bytes. Of these, 80% are masked, 10% are replaced by others,
    and 10% are unchanged.
    """
    if len(text) < length:
        raise SystemExit(f"the text has {len(text)} bytes for sequences of {length}: give more")
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(text) - length + 1, size=(*shape, 1))
    tokens = text[starts + np.arange(length)].astype(np.int32)
    positions = rng.random(tokens.shape).argsort(axis=-1)[..., : math.ceil(0.15 * length)]
    answers = np.take_along_axis(tokens, positions, axis=-1)
    how, others = rng.random(answers.shape), rng.integers(256, size=answers.shape)
    shown = np.where(how < 0.8, MASK, np.where(how < 0.9, others, answers))
    np.put_along_axis(tokens, positions, shown, axis=-1)
    return Batch(tokens, positions.astype(np.int32), answers)
