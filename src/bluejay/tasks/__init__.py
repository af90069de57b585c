"""Data sets to text and back, and how well a model does on them."""

from bluejay.tasks.perplexity import Perplexity, perplexity, windows
from bluejay.tasks.samples import fill, label_name, read_rows, read_samples

__all__ = ["Perplexity", "fill", "label_name", "perplexity", "read_rows", "read_samples", "windows"]
