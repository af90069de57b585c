"""Generation: one engine, its sampler, beam search, stop matching and detokenizer."""

from bluejay.generate.beam import BeamSearch, Hypothesis
from bluejay.generate.buckets import cover, fit
from bluejay.generate.detokenizer import StreamDecoder
from bluejay.generate.engine import (
    Completion,
    Engine,
    Figures,
    Generation,
    NumericsError,
    Piece,
    Request,
    TokenLogprob,
    compile_ahead,
    load,
    run_config,
)
from bluejay.generate.sampler import BAD_LOGITS, Sampling, rank_tokens, sample, sub_seed, uniform
from bluejay.generate.stop import StopMatcher

__all__ = [
    "BAD_LOGITS",
    "BeamSearch",
    "Completion",
    "Engine",
    "Figures",
    "Generation",
    "Hypothesis",
    "NumericsError",
    "Piece",
    "Request",
    "Sampling",
    "StopMatcher",
    "StreamDecoder",
    "TokenLogprob",
    "compile_ahead",
    "cover",
    "fit",
    "load",
    "rank_tokens",
    "run_config",
    "sample",
    "sub_seed",
    "uniform",
]
