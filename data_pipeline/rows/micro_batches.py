"""``MicroBatches``: which of a step's rows go through the model together, on which data rank. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatches:
    """The rows of one step, dealt out in their order: micro-batch after micro-batch, within one the data ranks."""

    sizes: tuple[int, ...]
    """Rows of each micro-batch, the same on every data rank, so that ranks of a collective stay in step. They differ by
    one at most; the larger ones come first."""
    data_degree: int = 1
    """Data ranks."""

    @classmethod
    def deal(cls, rows_per_step: int, *, most_rows: int, data_degree: int = 1) -> MicroBatches:
        """The fewest micro-batches of at most ``most_rows`` rows, as equal as they can be.

        ``rows_per_step`` are those of all data ranks, which they divide equally.
        """
        rows, rest = divmod(rows_per_step, data_degree)
        assert rows > 0, f"{rows_per_step} rows over {data_degree} data ranks"
        assert not rest, f"{rows_per_step} rows over {data_degree} data ranks"
        count = -(-rows // most_rows)
        each, larger = divmod(rows, count)
        return cls((each + 1,) * larger + (each,) * (count - larger), data_degree)

    def __len__(self) -> int:
        """Micro-batches that each data rank takes for one step."""
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """Rows of the largest one."""
        return self.sizes[0]

    def rows(self, number: int, data_rank: int) -> range:
        """The step's rows in one micro-batch of one data rank."""
        size = self.sizes[number]
        first = sum(self.sizes[:number]) * self.data_degree + data_rank * size
        return range(first, first + size)
