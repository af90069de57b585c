"""Names, shapes and cuts of GPT-J's parameters as data, so that planning and cutting need no module.

A matrix that is cut along dim 0 gives each device some of the outputs, along dim 1 some of the inputs: the products of
the latter are partial and must be added up. What is not in the table is the same on every device.
"""

from __future__ import annotations

from bluejay.config import ModelConfig

# Ending of a parameter's name -> the dim that tensor parallel devices share out.
CUTS: dict[str, int] = {
    "attn.q_proj.weight": 0,  # whole heads
    "attn.k_proj.weight": 0,
    "attn.v_proj.weight": 0,
    "attn.out_proj.weight": 1,
    "mlp.fc_in.weight": 0,
    "mlp.fc_in.bias": 0,
    "mlp.fc_out.weight": 1,  # its bias stays whole and is added once, after the sum
    "transformer.wte.weight": 0,  # the vocabulary, padded to a multiple of the degree
    "lm_head.weight": 0,
    "lm_head.bias": 0,
}
# Endings of the matrices that group quantization packs.
QUANTIZED: tuple[str, ...] = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "out_proj.weight",
    "fc_in.weight",
    "fc_out.weight",
    "lm_head.weight",
)
EMBEDDING = "transformer.wte."
HEAD = ("transformer.ln_f.", "lm_head.")


def cut_dim(name: str) -> int | None:
    """The dim along which parameter `name` is cut, or None when every device holds all of it."""
    return next((dim for ending, dim in CUTS.items() if name.endswith(ending)), None)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, in the model's order; a tied head's matrix stands under both its names."""
    width, inner = config.n_embd, config.inner_dim
    block: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.k_proj.weight": (width, width),
        "attn.v_proj.weight": (width, width),
        "attn.q_proj.weight": (width, width),
        "attn.out_proj.weight": (width, width),
        "mlp.fc_in.weight": (inner, width),
        "mlp.fc_in.bias": (inner,),
        "mlp.fc_out.weight": (width, inner),
        "mlp.fc_out.bias": (width,),
    }
    return {
        "transformer.wte.weight": (config.vocab_size, width),
        **{f"transformer.h.{i}.{name}": shape for i in range(config.n_layer) for name, shape in block.items()},
        "transformer.ln_f.weight": (width,),
        "transformer.ln_f.bias": (width,),
        "lm_head.weight": (config.vocab_size, width),
        "lm_head.bias": (config.vocab_size,),
    }


def part_shape(name: str, shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Shape of one device's part of a parameter; the vocabulary is rounded up, everything else must divide."""
    dim = cut_dim(name)
    if dim is None:
        return shape
    return tuple(-(-size // parts) if i == dim else size for i, size in enumerate(shape))
