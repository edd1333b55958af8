"""Data of workloads: readers of real formats, and generators for when there is none."""

from slipstream.apps.bench.data.characters import CharacterText, Windows, read_characters
from slipstream.apps.bench.data.examples import (
    Batch,
    Examples,
    SparseBatch,
    SparseExamples,
    Split,
    TensorExamples,
)
from slipstream.apps.bench.data.idx import read_idx, read_images
from slipstream.apps.bench.data.labelled_text import LabelledText, read_labelled_text
from slipstream.apps.bench.data.libsvm import read_libsvm, read_sparse_rows
from slipstream.apps.bench.data.rated_items import RatedItems, RatingBatch, read_rated_items
from slipstream.apps.bench.data.ratings import Ratings, read_ratings
from slipstream.apps.bench.data.vocabulary import TextSplit, Vocabulary, encode_text

__all__ = [
    "Batch",
    "CharacterText",
    "Examples",
    "LabelledText",
    "RatedItems",
    "RatingBatch",
    "Ratings",
    "SparseBatch",
    "SparseExamples",
    "Split",
    "TensorExamples",
    "TextSplit",
    "Vocabulary",
    "Windows",
    "encode_text",
    "read_characters",
    "read_idx",
    "read_images",
    "read_labelled_text",
    "read_libsvm",
    "read_rated_items",
    "read_ratings",
    "read_sparse_rows",
]
