"""Writes the tables of the page on networks: what the optimizers do with each, and ask.

python docs/write_networks.py
"""

from collections import Counter
from collections.abc import Callable, Mapping
import functools
from pathlib import Path
import sys
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from benchmarks.harness.pages import markdown, with_tables  # noqa: E402
from tests.networks.network import NAMES, OPTIMIZERS, Network  # noqa: E402
from tests.networks.verdicts import Verdict, trial, verdict  # noqa: E402

ENDS = ("embeddings", "head")
"""The arguments that `planned_optimizer` alone has."""

MODELS = {
    "gpt2_hf_flax": "GPT-2 (Transformers)",
    "llama_hf_flax": "Llama (Transformers)",
    "t5x_minimal": "T5 (t5x)",
    "vit_hf_flax": "ViT (Transformers)",
    "clip_hf_flax": "CLIP (Transformers)",
    "mixer_big_vision": "MLP-Mixer (big_vision)",
    "mamba2_nnx": "Mamba 2 (Bonsai)",
    "s5": "S5",
    "lora_nnx": "LoRA (nnx)",
    "stacked_transformer_nnx": "GPT-2 (nnx, `nnx.vmap`)",
    "midgpt_equinox": "GPT-2 (midGPT in Equinox)",
    "bert_keras_hub": "BERT (KerasHub)",
    "maxtext_llama_scan1": "Llama (MaxText)",
    "levanter_llama": "Llama (Levanter)",
    "qwen3_nnx": "Qwen3 (Bonsai in nnx)",
    "gemma_big_vision_scan": "Gemma (big_vision)",
    "maxtext_moe_scan1": "MoE: Mixtral (MaxText)",
    "maxtext_deepseek_scan1": "MoE: DeepSeek (MaxText)",
    "whisper_hf_flax": "Whisper (Transformers)",
    "vit_big_vision_scan": "ViT (big_vision, scanned)",
    "vit_equinox": "ViT (Equinox)",
    "convnext_nnx": "ConvNeXt (Bonsai in nnx)",
    "resnet50_flax": "ResNet (Flax linen)",
    "resnet50_haiku": "ResNet (Haiku)",
    "unet_diffusers": "U-Net (Diffusers)",
    "unet_linen": "U-Net (linen)",
    "dit_flax": "DiT (linen)",
    "flux_maxdiffusion": "Flux (MaxDiffusion)",
    "ppo_purejaxrl": "PPO (PureJaxRL)",
    "equinox_mlp": "MLP (Equinox)",
}
"""What the table calls a network and its library."""


@functools.cache
def verdict_of(name: str, optimizer: str) -> Verdict:
    """What becomes of a network with an optimizer."""
    return verdict(Network(name), optimizer)


def models_table() -> str:
    """What `planned_optimizer` is told of each network."""
    models: dict[str, list[str]] = {}
    for name, label in MODELS.items():
        models.setdefault(_code(_told(name)), []).append(label)
    lines = [[", ".join(labels), code] for code, labels in models.items()]
    return markdown(["model (library)", "what to say"], lines)


def _told(name: str) -> dict[str, Any]:
    """The arguments that are right, as the messages have them, with shorter patterns."""
    network = Network(name)
    planned = verdict_of(name, "planned_optimizer").arguments
    arguments = verdict_of(name, "muonh").arguments | {
        end: planned[end] for end in ENDS if end in planned
    }
    for argument in ("stacked", "matrix_axes"):
        for pattern in arguments.get(argument, {}):
            entries = {
                _without_ends(pattern) if key == pattern else key: value
                for key, value in arguments[argument].items()
            }
            if _is_right(network, arguments | {argument: entries}):
                arguments |= {argument: entries}
    if not _is_right(network, arguments):
        raise ValueError(f"{name} is not moved rightly with {arguments}.")
    return arguments


def _without_ends(pattern: str) -> str:
    """A pattern that matches more names, and is easier to read."""
    return pattern.removeprefix("(^|/)").removeprefix("params/").removesuffix("$")


def _is_right(network: Network, arguments: dict[str, Any]) -> bool:
    """Whether MuonH moves all rightly with the arguments, and asks for nothing more."""
    of_muonh = {key: value for key, value in arguments.items() if key not in ENDS}
    trials = [
        trial(network, "planned_optimizer", arguments),
        trial(network, "muonh", of_muonh),
    ]
    return all(each.is_right and not each.messages for each in trials)


def _code(arguments: Mapping[str, Any]) -> str:
    """The arguments as code in a cell."""
    code = ", ".join(f"`{name}={value!r}`" for name, value in arguments.items())
    return code.replace("=matching(", "=lb.matching(").replace("|", "\\|") or "nothing"


def counts_table() -> str:
    """How many networks are moved rightly, and how many after questions."""
    kinds = {
        "right, with nothing said": "right",
        "right, after it has asked": "asks",
        "wrong, and nothing is said": "silent",
        "led astray by a message": "misleading",
        "an error that does not say what to do": "crash",
    }
    counts = [Counter(verdict_of(name, each).kind for name in NAMES) for each in OPTIMIZERS]
    lines = [[words, *(str(count[kind]) for count in counts)] for words, kind in kinds.items()]
    return markdown([f"of {len(NAMES)} networks", *(f"`{each}`" for each in OPTIMIZERS)], lines)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "guides/your_model.md": {"models": models_table, "networks": counts_table},
}


def written(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page as it should be."""
    return with_tables(page, "docs/write_networks.py", tables)


if __name__ == "__main__":
    for path, tables in PAGES.items():
        page = DOCS / path
        page.write_text(written(page.read_text(), tables))
