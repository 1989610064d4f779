"""The section `data`, and its sources."""

from dataclasses import dataclass

from moe_jax.config.ranges import ANY, PARTS, SEQUENCE, Range, number
from moe_jax.config.sections.hashing import HashedOnce

TOKEN_AXES = ("data", "expert", "context", "tensor")  # along which ranks have tokens of their own
MOST_MARKED_SOURCES = 32  # bits of tokens that are free for it (data/token_marks.py)
TEXT_SUFFIXES = (".jsonl", ".parquet", ".array_record")  # of files whose text is encoded while a run trains


@dataclass(frozen=True, kw_only=True)
class DataSource:
    """One source of a mixture of tokens, see docs/data.md."""

    # a folder of token files, a .txt (read as bytes), .jsonl, .parquet or .array_record file, or a saved dataset
    path: str
    weight: float  # of its sequences: their share is weight / sum of all weights; 0: it is only validated on
    # changes of the weight, as pairs of a step (counted from 1) and the weight from then on: [[1000, 0.5], [5000, 2]]
    weight_schedule: tuple[tuple[float, ...], ...] = ()
    name: str | None = None  # in metrics; null: the last part of the path, without the suffix of a file

    @property
    def label(self) -> str:
        """The name in metrics and messages."""
        if self.name:
            return self.name
        last = self.path.rstrip("/").rpartition("/")[2]
        return next((last.removesuffix(kind) for kind in (".txt", *TEXT_SUFFIXES) if last.endswith(kind)), last)

    def weight_at(self, step: int) -> float:
        """Return the weight in a step, counted from 1."""
        return next((weight for first, weight in reversed(self.weight_schedule) if first <= step), self.weight)


@dataclass(frozen=True, kw_only=True)
class DataConfig(HashedOnce):
    """The source of tokens."""

    __hash__ = HashedOnce.__hash__

    # a folder of token files, a .txt (read as bytes), .jsonl, .parquet or .array_record file, or a dataset of Hugging
    # Face that was saved to disk; null, or its default, with `sources`
    path: str | None = "configs/text/shakespeare.txt"
    sources: tuple[DataSource, ...] = ()  # a weighted mixture of several, instead of `path`
    # bytes, or a folder with a tokenizer.json: with it all text but .txt files is encoded while the run trains
    tokenizer: str = "bytes"
    # the field of a .jsonl object or an .array_record file's records, or the column of a .parquet file or dataset, with
    # the text
    text_key: str = "text"
    seq_len: int = number(256, Range(2, SEQUENCE))  # tokens per sequence
    # share of a file's text, at its end, for validation; a folder has its own validation file
    validation_fraction: float = number(0.1, Range(0, 1, above=True, below=True))
    prefetch: int = number(8, Range(0, PARTS))  # batches read ahead
    # pieces of a prepared file that may be damaged and are skipped, see docs/data.md
    damaged_chunks: int = number(0, Range(0, ANY))
    # whether tokens attend to their own document alone; the first token of a document is then not predicted. The
    # documents are those of a prepared folder
    mask_documents: bool = False

    @property
    def has_marks(self) -> bool:
        """Whether the tokens of batches have marks (data/token_marks.py)."""
        return self.mask_documents or self.marked_sources > 0

    @property
    def marked_sources(self) -> int:
        """The number of sources that steps compute losses of; 0 if there is one source, or more than there are marks
        for.
        """
        return len(self.sources) if 1 < len(self.sources) <= MOST_MARKED_SOURCES else 0

    @property
    def mixture(self) -> tuple[DataSource, ...]:
        """The sources; one if there is no mixture."""
        return self.sources or (DataSource(path=self.path or "", weight=1.0),)

    @property
    def weight_steps(self) -> tuple[int, ...]:
        """The first step, and each one from which a source has another weight, in order."""
        steps = sorted({1, *(int(step) for source in self.mixture for step, _ in source.weight_schedule)})
        weights = [[source.weight_at(step) for source in self.mixture] for step in steps]
        return tuple(step for n, step in enumerate(steps) if n == 0 or weights[n] != weights[n - 1])

    @property
    def path_names(self) -> tuple[str, ...]:
        """The names of the settings with the paths of the sources, for messages."""
        return tuple(f"data.sources[{number}].path" for number in range(len(self.sources))) or ("data.path",)
