"""Data sets to text and back, and how well a model does on them."""

from bluejay.tasks.mnli import MNLI_LABELS, MNLI_PROMPT, Mnli, labelled_rows, mnli, order_warning, read_answer
from bluejay.tasks.perplexity import Perplexity, perplexity, windows
from bluejay.tasks.samples import fill, label_name, read_rows, read_samples

__all__ = [
    "MNLI_LABELS",
    "MNLI_PROMPT",
    "Mnli",
    "Perplexity",
    "fill",
    "label_name",
    "labelled_rows",
    "mnli",
    "order_warning",
    "perplexity",
    "read_answer",
    "read_rows",
    "read_samples",
    "windows",
]
