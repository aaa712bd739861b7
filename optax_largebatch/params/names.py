"""What a parameter is, by its name: one table, with a reason for each row.

A name is the path joined by `/`. What no name can tell is decided by shapes (`shapes.py`).
"""

import functools
import re

_END = r"(/\d+)*$"
"""The end of a name. Arrays in a list are of the kind that the list is called."""

NAMES: dict[str, tuple[str, ...]] = {
    "bias": (rf"(^|/)(bias|b){_END}",),  # Flax, Keras and Equinox; `b` is Haiku's
    "norm": (
        rf"(^|/)(scale|gamma|beta){_END}",  # the arrays of a normalisation
        r"norm[^/]*/",  # all that is in a LayerNorm, BatchNorm, RMSNorm ...
        rf"norm(_?\d+|_(scale|weight|gain|bias))?{_END}",  # a norm that is one array
        r"(^|/)([^/]*_)?(bn|gn|ln)(_[^/]*|\d*)(/|$)",  # short: bn1, ln_f, attn_ln of Whisper
        rf"(^|/)(gamma|ls|layer_?scale)_?\d*{_END}",  # LayerScale of vision transformers
    ),
    "position": (r"pos(ition)?(al)?_?emb",),  # added to embeddings, as pos_embedding
    "token": (rf"(^|/)(cls|class)(_?token)?{_END}",),  # the class token of a ViT
    "vector": (
        # Attention of Flax and Keras: (heads, size); pos_bias_u of Conformer.
        rf"(^|/)([^/]*_)?bias(_?\d+|_[a-z]{{1,2}})?{_END}",
        rf"(^|/)b_?([qkvo]|\d+){_END}",  # b1, bq: plain dictionaries, some with (1, size)
        rf"(^|/)(gating|query|key|value|qkv)_b{_END}",  # AlphaFold's: (heads, size)
        rf"(^|/)((input|a)_gate|ffw_up)/b{_END}",  # Griffin's: (heads, size)
        rf"(^|/)(scale|gamma|beta|offset|gain){_END}",  # norms with several axes
        rf"(^|/)weight_g{_END}",  # the lengths of a weight normalisation: (1, 1, size)
        # T5, Swin: a bias for each distance and head.
        rf"rel(ative)?_?(pos|att|emb)[^/]*(/[^/]*(embedding|bias|weight))?{_END}",
        rf"(^|/)([^/]*_log|log_[^/]*|dt_[^/]*|lambda[^/]*){_END}",  # states: Mamba, S4, S5
        rf"(^|/)[^/]*_(re|im|real|imag){_END}",  # parts of complex arrays: LRU, S4D, FNO
        rf"(^|/)(seq|ssm|s4d?|s5|lru)/[A-EPQ]\d?{_END}",  # the matrices of S4 by a name of theirs
        rf"(^|/)(r_k|k_[ka]|x_[rwkvag]|[awv]0){_END}",  # RWKV-7's: (1, 1, size)
        rf"(^|/)time_(decay|first|faaaa|mix|maa)[^/]*{_END}",  # RWKV's: (heads, size)
    ),
    "embedding": (
        r"embed|embs?(_\d+)?(/|$)",  # nearly all libraries
        r"(^|/)(w[tp]e|pos|positions?|vocab|codebook)(/|$)",  # GPT-2's wte and wpe
        rf"(^|/)[^/]*(cls|class|register|mask|query|latent)_?tokens?{_END}",  # learned tokens
        rf"(^|/)latents{_END}",  # the learned array of a Perceiver
        r"(^|/)(w_e|w_pos)$",  # as papers on circuits call them
    ),
    "head": (
        r"(^|/)((?!multi|attn|attention)[^/]*_)?head(_?\d+)?(/|$)",  # lm_head, head
        r"unembed|(?<!pre_)logits|classifier|predictions|readout",  # what it puts out
        r"(^|/)(qa_outputs|seq_relationship|score)(/(kernel|w|weight|bias))?$",  # of a BERT
        r"(^|/)(text|visual|vision|image)_projection(/|$)",  # CLIP's two heads
        r"(^|/)final_?(layer|proj)(_\d+)?(/|$)",  # diffusion transformers
        # At the root: ResNet's fc, S5's decoder, Flux's proj_out.
        r"^(params/)?(fc|decoder|proj_out|outputs?)(/(kernel|w|weight))?$",
    ),
    "adapter": (r"lora|adapter",),  # for matrices that are not trained
    "router": (r"(^|/)(gate|router|gating)(/(kernel|w|weight))?$",),  # of experts
    "stack": (  # for modules of kernels alone: biases and scales show what is stacked
        r"(^|/)([^/]*_)?(layers|blocks|experts|layer_stack)$",  # as most libraries call it
        r"(^|/)[^/]*scan[^/]*$",  # linen.scan
        r"(^|/)h$",  # GPT-2's layers
    ),
    "attention to heads": (
        r"(^|/)(query|key|value)/kernel$",  # (inputs, heads, size) of Flax, Keras, MaxText
    ),
    "attention from heads": (
        r"att[^/]*/(out|attention_output)/kernel$",  # (heads, size, outputs) of the same
    ),
    "heads of inputs": (
        r"(^|/)(to_|c_)?(query|key|value|[qkv])(_proj(ection)?)?(/|$)",  # attention's inputs
        r"(^|/)w(q|k|v|qkv|kv)(_b)?(/|$)",  # Llama and MaxText
        r"(^|/)(query|key|value|gating)_w$",  # AlphaFold
    ),
    "heads to outputs": (
        r"(^|/)(to_)?(out|o|output)(_proj(ection)?|_\d+)?(/|$)",  # attention's outputs
        r"(^|/)(wo|attention_output|output_w)(/|$)",  # Llama, Keras and AlphaFold
    ),
    "stack of matrices": (r"einsum|expert|moe",),  # Gemma's heads, and experts
    "convolution": (r"conv|downsample|patch|stem",),  # windows first, or last
    "norm of an image": (
        # Equinox's LayerNorm: (channels, height, width).
        r"(norm\d*|(^|/)([^/]*_)?(bn|gn|ln)(_[^/]*|\d*))/weight$",
    ),
    "depthwise": (
        # Of two axes, (window, channels): Griffin.
        r"(^|/)((short|causal|temporal)_?conv(_?1d)?|conv_?1d)(/(kernel|w|weight))?$",
    ),
    "outputs first": (
        r"(^|/)weight(_[^/]*)?$",  # PyTorch, Equinox and Haliax; Flax's are called kernel
    ),
    "more outputs": (
        r"(^|/)(c_fc|fc_?1|fc_in|up|(up|gate)_proj|w[13]|wi(_\d)?)(/|$)",  # of an MLP
        r"(^|/)(c_attn|qkv|qkv_proj|in_proj)(/|$)",  # queries, keys and values
    ),
    "fewer outputs": (r"(^|/)(fc_?2|fc_out|down|down_proj|w2|wo)(/|$)",),  # of an MLP
    "three matrices": (r"qkv|query_key_value|in_proj|c_attn",),  # queries, keys and values
    "two matrices": (
        r"(^|/|_)w?kv(_|/|$)|key_?value",  # keys and values
        r"gate_?up|up_?gate|(^|/)wi(_fused)?(/|$)|w1[23]|linear_fc1",  # a gate and its input
    ),
}
"""The patterns of each kind. What is written large or small does not count."""


@functools.lru_cache(2**16)
def is_called(kind: str, name: str) -> bool:
    """Whether a name is one of a kind."""
    return any(re.search(pattern, name, re.IGNORECASE) for pattern in NAMES[kind])
