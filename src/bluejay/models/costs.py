"""What a GPT-J of given sizes costs: parameters, FLOPs, and bytes. Pure arithmetic on a ModelConfig.

A multiply-add is two FLOPs. Only matrix products are counted, as everywhere in the field: norms, activations and the
rotation are below one percent at any width worth measuring. Attention is counted as kernels do it, every new token
against every token of its row, without a discount for the causal half that is masked.
"""

from __future__ import annotations

from bluejay.config import ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters, each counted once: a tied head adds only its bias."""
    embedding = config.vocab_size * config.n_embd
    head = config.vocab_size + (0 if config.tie_word_embeddings else embedding)
    final_norm = 2 * config.n_embd
    return embedding + config.n_layer * _block_parameters(config) + final_norm + head


def weight_bytes(config: ModelConfig, element_bytes: float) -> float:
    """Bytes that all weights take at `element_bytes` each (2 for bf16 and fp16, 0.5 for 4 bits without scales)."""
    return num_parameters(config) * element_bytes


def prefill_flops(config: ModelConfig, num_tokens: int, past: int = 0, num_logits: int = 1) -> int:
    """FLOPs to process `num_tokens` new tokens of one row that holds `past` tokens, with logits for `num_logits`."""
    projections = num_tokens * config.n_layer * 2 * block_matrix_elements(config)
    attention = config.n_layer * 2 * (2 * num_tokens * (past + num_tokens) * config.n_embd)  # scores, then mixing
    head = num_logits * 2 * config.n_embd * config.vocab_size
    return projections + attention + head


def decode_flops(config: ModelConfig, context: int) -> int:
    """FLOPs to produce one token of one row that then holds `context` tokens, the new one included."""
    return prefill_flops(config, num_tokens=1, past=context - 1)


def weight_bytes_read_per_decoded_token(config: ModelConfig, element_bytes: float, batch: int = 1) -> float:
    """Bytes of weights read from memory for each decoded token when `batch` rows share one reading of them.

    Everything but the embedding is read once a step; of the embedding, one line a row. A tied head reads it all.
    """
    embedding = config.vocab_size * config.n_embd
    once_per_step = num_parameters(config) - (0 if config.tie_word_embeddings else embedding)
    return (once_per_step / batch + config.n_embd) * element_bytes


def kv_bytes_per_token(config: ModelConfig, element_bytes: float) -> float:
    """Bytes that the keys and values of one token take in the cache, over all layers."""
    return 2 * config.n_layer * config.n_embd * element_bytes


def kv_bytes_read_per_decoded_token(config: ModelConfig, context: int, element_bytes: float) -> float:
    """Bytes of cache read to produce one token of a row that then holds `context` tokens."""
    return context * kv_bytes_per_token(config, element_bytes)


def decode_seconds_floor(
    config: ModelConfig, context: int, element_bytes: float, read_bytes_per_second: float, batch: int = 1
) -> float:
    """Seconds below which no decode step of `batch` rows can fall: its bytes over the machine's reading speed."""
    weights = weight_bytes_read_per_decoded_token(config, element_bytes, batch) * batch
    cache = kv_bytes_read_per_decoded_token(config, context, element_bytes) * batch
    return (weights + cache) / read_bytes_per_second


def block_matrix_elements(config: ModelConfig) -> int:
    """Elements of the matrices of one block: q, k, v and output projections, and the two of the MLP."""
    return 4 * config.n_embd**2 + 2 * config.n_embd * config.inner_dim


def _block_parameters(config: ModelConfig) -> int:
    norm, mlp_biases = 2 * config.n_embd, config.inner_dim + config.n_embd
    return block_matrix_elements(config) + norm + mlp_biases
