"""What a parameter is, by its name: one table, with a reason for each row.

A name is the path joined by `/`. What no name can tell is decided by shapes (`shapes.py`).
"""

import functools
import re
from typing import NamedTuple

_END = r"(/\d+)*$"
"""The end of a name. Arrays in a list are of the kind that the list is called."""


class Row(NamedTuple):
    """Names of one kind."""

    pattern: str
    reason: str


NAMES: dict[str, tuple[Row, ...]] = {
    "bias": (Row(rf"(^|/)(bias|b){_END}", "Flax, Keras and Equinox; `b` is Haiku's"),),
    "norm": (
        Row(rf"(^|/)(scale|gamma|beta){_END}", "the arrays of a normalisation"),
        Row(r"norm[^/]*/", "all that is in a LayerNorm, BatchNorm, RMSNorm ..."),
        Row(rf"norm(_?\d+|_(scale|weight|gain|bias))?{_END}", "a norm that is one array"),
        Row(r"(^|/)([^/]*_)?(bn|gn|ln)(_[^/]*|\d*)(/|$)", "short: bn1, ln_f, attn_ln of Whisper"),
        Row(rf"(^|/)(gamma|ls|layer_?scale)_?\d*{_END}", "LayerScale of vision transformers"),
    ),
    "position": (Row(r"pos(ition)?(al)?_?emb", "added to embeddings, as pos_embedding"),),
    "token": (Row(rf"(^|/)(cls|class)(_?token)?{_END}", "the class token of a ViT"),),
    "vector": (
        Row(
            rf"(^|/)([^/]*_)?bias(_?\d+|_[a-z]{{1,2}})?{_END}",
            "attention of Flax and Keras: (heads, size); pos_bias_u of Conformer",
        ),
        Row(rf"(^|/)b_?([qkvo]|\d+){_END}", "b1, bq: plain dictionaries, some with (1, size)"),
        Row(rf"(^|/)(gating|query|key|value|qkv)_b{_END}", "AlphaFold's: (heads, size)"),
        Row(rf"(^|/)((input|a)_gate|ffw_up)/b{_END}", "Griffin's: (heads, size)"),
        Row(rf"(^|/)(scale|gamma|beta|offset|gain){_END}", "norms with several axes"),
        Row(rf"(^|/)weight_g{_END}", "the lengths of a weight normalisation: (1, 1, size)"),
        Row(
            rf"rel(ative)?_?(pos|att|emb)[^/]*(/[^/]*(embedding|bias|weight))?{_END}",
            "T5, Swin: a bias for each distance and head",
        ),
        Row(rf"(^|/)([^/]*_log|log_[^/]*|dt_[^/]*|lambda[^/]*){_END}", "states: Mamba, S4, S5"),
        Row(rf"(^|/)[^/]*_(re|im|real|imag){_END}", "parts of complex arrays: LRU, S4D, FNO"),
        Row(
            rf"(^|/)(seq|ssm|s4d?|s5|lru)/[A-EPQ]\d?{_END}",
            "the matrices of S4 by a name of theirs",
        ),
        Row(rf"(^|/)(r_k|k_[ka]|x_[rwkvag]|[awv]0){_END}", "RWKV-7's: (1, 1, size)"),
        Row(rf"(^|/)time_(decay|first|faaaa|mix|maa)[^/]*{_END}", "RWKV's: (heads, size)"),
    ),
    "embedding": (
        Row(r"embed|embs?(_\d+)?(/|$)", "nearly all libraries"),
        Row(r"(^|/)(w[tp]e|pos|positions?|vocab|codebook)(/|$)", "GPT-2's wte and wpe"),
        Row(rf"(^|/)[^/]*(cls|class|register|mask|query|latent)_?tokens?{_END}", "learned tokens"),
        Row(rf"(^|/)latents{_END}", "the learned array of a Perceiver"),
        Row(r"(^|/)(w_e|w_pos)$", "as papers on circuits call them"),
    ),
    "head": (
        Row(r"(^|/)((?!multi|attn|attention)[^/]*_)?head(_?\d+)?(/|$)", "lm_head, head"),
        Row(r"unembed|(?<!pre_)logits|classifier|predictions|readout", "what it puts out"),
        Row(r"(^|/)(qa_outputs|seq_relationship|score)(/(kernel|w|weight|bias))?$", "of a BERT"),
        Row(r"(^|/)(text|visual|vision|image)_projection(/|$)", "CLIP's two heads"),
        Row(r"(^|/)final_?(layer|proj)(_\d+)?(/|$)", "diffusion transformers"),
        Row(
            r"^(params/)?(fc|decoder|proj_out|outputs?)(/(kernel|w|weight))?$",
            "at the root: ResNet's fc, S5's decoder, Flux's proj_out",
        ),
    ),
    "adapter": (Row(r"lora|adapter", "for matrices that are not trained"),),
    "router": (Row(r"(^|/)(gate|router|gating)(/(kernel|w|weight))?$", "of experts"),),
    "stack": (
        Row(r"(^|/)([^/]*_)?(layers|blocks|experts|layer_stack)$", "as most libraries call it"),
        Row(r"(^|/)[^/]*scan[^/]*$", "linen.scan"),
        Row(r"(^|/)h$", "GPT-2's layers"),
    ),
    "attention to heads": (
        Row(r"(^|/)(query|key|value)/kernel$", "(inputs, heads, size) of Flax, Keras, MaxText"),
    ),
    "attention from heads": (
        Row(r"att[^/]*/(out|attention_output)/kernel$", "(heads, size, outputs) of the same"),
    ),
    "heads of inputs": (
        Row(r"(^|/)(to_|c_)?(query|key|value|[qkv])(_proj(ection)?)?(/|$)", "attention's inputs"),
        Row(r"(^|/)w(q|k|v|qkv|kv)(_b)?(/|$)", "Llama and MaxText"),
        Row(r"(^|/)(query|key|value|gating)_w$", "AlphaFold"),
    ),
    "heads to outputs": (
        Row(r"(^|/)(to_)?(out|o|output)(_proj(ection)?|_\d+)?(/|$)", "attention's outputs"),
        Row(r"(^|/)(wo|attention_output|output_w)(/|$)", "Llama, Keras and AlphaFold"),
    ),
    "stack of matrices": (Row(r"einsum|expert|moe", "Gemma's heads, and experts"),),
    "convolution": (Row(r"conv|downsample|patch|stem", "windows first, or last"),),
    "norm of an image": (
        Row(
            r"(norm\d*|(^|/)([^/]*_)?(bn|gn|ln)(_[^/]*|\d*))/weight$",
            "Equinox's LayerNorm: (channels, height, width)",
        ),
    ),
    "depthwise": (
        Row(
            r"(^|/)((short|causal|temporal)_?conv(_?1d)?|conv_?1d)(/(kernel|w|weight))?$",
            "of two axes, (window, channels): Griffin",
        ),
    ),
    "outputs first": (
        Row(r"(^|/)weight(_[^/]*)?$", "PyTorch, Equinox and Haliax; Flax's are called kernel"),
    ),
    "more outputs": (
        Row(r"(^|/)(c_fc|fc_?1|fc_in|up|(up|gate)_proj|w[13]|wi(_\d)?)(/|$)", "of an MLP"),
        Row(r"(^|/)(c_attn|qkv|qkv_proj|in_proj)(/|$)", "queries, keys and values"),
    ),
    "fewer outputs": (Row(r"(^|/)(fc_?2|fc_out|down|down_proj|w2|wo)(/|$)", "of an MLP"),),
    "three matrices": (Row(r"qkv|query_key_value|in_proj|c_attn", "queries, keys and values"),),
    "two matrices": (
        Row(r"(^|/|_)w?kv(_|/|$)|key_?value", "keys and values"),
        Row(r"gate_?up|up_?gate|(^|/)wi(_fused)?(/|$)|w1[23]|linear_fc1", "a gate and its input"),
    ),
}
"""The rows of each kind. What is written large or small does not count."""


@functools.lru_cache(2**16)
def is_called(kind: str, name: str) -> bool:
    """Whether a name is one of a kind."""
    return any(re.search(row.pattern, name, re.IGNORECASE) for row in NAMES[kind])
