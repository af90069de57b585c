"""The shape and constants of one GPT-J model, and its translation from and to a Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from bluejay.config.quant import QUANT_METHOD
from bluejay.errors import CheckpointError, ConfigError

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu", "relu", "silu", "swish")
DTYPES = ("float32", "bfloat16", "float16")

# Keys of a GPT-J config.json that change nothing we compute. Anything not listed here or read below is reported.
IGNORED_HF_KEYS = frozenset(
    """_name_or_path _attn_implementation_autoset add_cross_attention architectures bad_words_ids begin_suppress_tokens
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder label2id
    length_penalty max_length min_length n_ctx no_repeat_ngram_size num_beam_groups num_beams num_return_sequences
    output_attentions output_hidden_states output_scores pad_token_id prefix problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torchscript transformers_version
    typical_p use_bfloat16 use_cache""".split()
)
# Keys whose only supported value is the one GPT-J has always had; another value is another model.
_FIXED_HF_KEYS: dict[str, Any] = {"rotary": True, "scale_attn_weights": True, "model_type": "gptj"}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a GPT-J model. Every size comes from here; no other place knows a number.

    Attributes:
        vocab_size: rows of the embedding and of the head (50400 for 6B, more than its tokenizer has entries).
        n_positions: the window: the largest number of tokens a row may hold.
        n_embd, n_layer, n_head: width, blocks, attention heads; n_embd must be a multiple of n_head.
        rotary_dim: leading dimensions of each head that are rotated; even, at most n_embd / n_head.
        n_inner: width of the MLP; 0 means 4 * n_embd.
        dtype: what the checkpoint says its weights are; "" when it does not say.
    """

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    rotary_dim: int
    n_inner: int = 0
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = False
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)  # unknown config.json keys, for the record

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def inner_dim(self) -> int:
        return self.n_inner or 4 * self.n_embd

    def context(self, asked: int) -> int:
        """Tokens a row may hold, when `asked` are wanted (0: the whole window).

        Raises:
            ConfigError: more than the window.
        """
        if asked > self.n_positions:
            raise ConfigError(
                asked=f"a context of {asked} tokens",
                found=f"the model's window is {self.n_positions}",
                rule="rotary positions beyond the trained window give noise",
                fix=f"set context to at most {self.n_positions}",
            )
        return asked or self.n_positions

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(name, value, "must be a whole number above 0")
        if self.n_embd % self.n_head:
            divisors = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            nearest = sorted(divisors, key=lambda h: abs(h - self.n_head))[:4]
            raise _wrong("n_head", self.n_head, f"must divide n_embd={self.n_embd}; near ones: {sorted(nearest)}")
        rotary, whole = self.rotary_dim, isinstance(self.rotary_dim, int) and not isinstance(self.rotary_dim, bool)
        if not whole or rotary < 2 or rotary % 2 or rotary > self.head_dim:
            raise _wrong("rotary_dim", rotary, f"must be even and between 2 and head_dim={self.head_dim}")
        if not isinstance(self.n_inner, int) or self.n_inner < 0:
            raise _wrong("n_inner", self.n_inner, "must be 0 (4 * n_embd) or a whole number above it")
        if self.activation_function not in ACTIVATIONS:
            raise _wrong("activation_function", self.activation_function, f"must be one of {', '.join(ACTIVATIONS)}")
        if not self.layer_norm_epsilon > 0:
            raise _wrong("layer_norm_epsilon", self.layer_norm_epsilon, "must be above 0")
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise _wrong(name, getattr(self, name), "must be at least 0 and below 1")
        for token in (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,))):
            if not 0 <= token < self.vocab_size:
                raise _wrong("bos/eos_token_id", token, f"must be at least 0 and below vocab_size={self.vocab_size}")
        if self.dtype not in ("", *DTYPES):
            raise _wrong("dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
        """The config that a Hugging Face `config.json` describes.

        Keys with no influence on the numbers are ignored by name (`IGNORED_HF_KEYS`); unknown ones are kept in
        `ignored_keys` so that the loader can warn.

        Raises:
            CheckpointError: not a GPT-J config, a key is missing, or a value asks for another architecture.
        """
        quantization = raw.get("quantization_config")
        ours = isinstance(quantization, Mapping) and quantization.get("quant_method") == QUANT_METHOD
        if quantization is not None and not ours:  # what ours says is the loader's to check
            raise CheckpointError(
                asked=f"read {source}",
                found=f"quantization_config: {quantization}",
                rule="weights packed by another tool's quantizer are not plain GPT-J tensors",
                fix="use the unquantized checkpoint",
            )
        for key, only in _FIXED_HF_KEYS.items():
            if raw.get(key, only) != only:
                raise CheckpointError(
                    asked=f"read {source} as GPT-J",
                    found=f"{key}: {raw[key]!r}",
                    rule=f"a GPT-J checkpoint has {key}: {only!r}",
                    fix="point to a checkpoint of the GPT-J architecture (Hugging Face class GPTJForCausalLM)",
                )
        sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "rotary_dim")
        aliases = {"n_positions": "max_position_embeddings", "n_embd": "hidden_size"}
        aliases |= {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
        values: dict[str, Any] = {}
        for name in sizes:
            value = raw.get(name, raw.get(aliases.get(name, "")))
            if value is None:
                raise CheckpointError(
                    asked=f"read {name} from {source}",
                    found="null" if name in raw else "no such key",
                    rule="sizes are never guessed; rotary_dim: null is not a GPT-J that any release of it trained",
                    fix=f"add {name} to the file (EleutherAI's 6B has rotary_dim 64, n_positions 2048)",
                )
            values[name] = value
        eos = raw.get("eos_token_id")
        values["eos_token_ids"] = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
        values["bos_token_id"] = raw.get("bos_token_id")
        values["n_inner"] = raw.get("n_inner") or 0
        values["dtype"] = str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
        for name in (
            "activation_function",
            "layer_norm_epsilon",
            "tie_word_embeddings",
            "embd_pdrop",
            "attn_pdrop",
            "resid_pdrop",
        ):
            if raw.get(name) is not None:
                values[name] = raw[name]
        _check_types(values, source)
        known = {f.name for f in fields(cls)} | set(aliases.values()) | {"eos_token_id", "torch_dtype"}
        unknown = set(raw) - known - IGNORED_HF_KEYS - set(_FIXED_HF_KEYS) - {"quantization_config"}
        try:
            return cls(**values, ignored_keys=tuple(sorted(unknown)))
        except ConfigError as error:
            raise CheckpointError(asked=f"read {source}", found=error.found, rule=error.rule, fix=error.fix) from None

    def to_hf(self) -> dict[str, Any]:
        """The config as a Hugging Face `config.json` that `transformers` loads as `GPTJForCausalLM`."""
        eos = self.eos_token_ids
        return {
            "architectures": ["GPTJForCausalLM"],
            "model_type": "gptj",
            "vocab_size": self.vocab_size,
            "n_positions": self.n_positions,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "rotary_dim": self.rotary_dim,
            "n_inner": self.n_inner or None,
            "activation_function": self.activation_function,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "tie_word_embeddings": self.tie_word_embeddings,
            "embd_pdrop": self.embd_pdrop,
            "attn_pdrop": self.attn_pdrop,
            "resid_pdrop": self.resid_pdrop,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            **({"dtype": self.dtype, "torch_dtype": self.dtype} if self.dtype else {}),
        }


def _check_types(values: Mapping[str, Any], source: str) -> None:
    """JSON says "1e-5" and 1e-5 apart, and so must we: the wrong one would fail later, or be taken for true."""
    kinds: dict[str, tuple[type, ...]] = {
        "activation_function": (str,),
        "tie_word_embeddings": (bool,),
        **dict.fromkeys(("layer_norm_epsilon", "embd_pdrop", "attn_pdrop", "resid_pdrop"), (int, float)),
        **dict.fromkeys(("bos_token_id",), (int, type(None))),
    }
    for name, value in values.items():
        items = value if isinstance(value, tuple) else (value,)
        allowed = kinds.get(name, (int,) if name != "dtype" else (str,))
        for item in items:
            if not isinstance(item, allowed) or (isinstance(item, bool) and bool not in allowed):
                raise CheckpointError(
                    asked=f"read {source}",
                    found=f"{name}: {item!r}",
                    rule=f"{name} must be {' or '.join(kind.__name__ for kind in allowed)}",
                    fix=f"correct {name}",
                )


def _wrong(name: str, value: object, rule: str) -> ConfigError:
    return ConfigError(
        asked=f"a model with {name}={value!r}", found=f"{name}={value!r}", rule=f"{name} {rule}", fix=f"correct {name}"
    )
