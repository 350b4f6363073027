"""Pictures of metadata: `str(meta)` in text and `meta.plot()` with matplotlib.

The rest of this package is imported when a picture is asked for, and matplotlib when it is plotted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..metadata import VarlenMetadata


class Pictures:
    """Base of `VarlenMetadata`."""

    def __str__(self: VarlenMetadata) -> str:  # type: ignore[misc]
        """The rows as text of at most 80 columns: sequences, padding, offsets and maxima.

        Metadata on a GPU is read once (a sync). While tracing, with fake tensors and inside a CUDA graph capture it
        cannot be read: then the text is what the host knows, and says so.

        Example:
            >>> import torch
            >>> from varlen_prep import prepare_varlen
            >>> mask = torch.tensor([[True, True, True, False, False], [False, True, True, True, True]])
            >>> print(prepare_varlen(2, 5, 5, mask, mask_q=mask))
            VarlenMetadata: batch 2, seq_q 5, seq_kv 5, layout packed, on cpu
            <BLANKLINE>
            queries: 7 of 10 rows take part
              row 0      AAA..  3
              row 1      .BBBB  4
              kernel     AAABBBB...
              offsets    0 3 7
              sequences  2, of 3 to 4 rows
              max_seqlen 5, an upper bound
            <BLANKLINE>
            keys: 7 of 10 rows take part
              row 0      AAA..  3
              row 1      .BBBB  4
              kernel     AAABBBB...
              offsets    0 3 7
              sequences  2, of 3 to 4 rows
              max_seqlen 4, exact
            <BLANKLINE>
            A letter is a sequence, '.' takes no part.
        """
        from .text import text

        return text(self)

    def plot(  # type: ignore[misc]
        self: VarlenMetadata,
        ax: Axes | None = None,
        *,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Figure:
        """Draws the rows and the attention pattern with matplotlib (extra `plot`).

        Metadata on a GPU is read once (a sync). Large batches are thinned out.

        Args:
            ax: matplotlib axes that get the pattern alone, in the padded order (packed rows have only their own).
                None: a new figure of rows and pattern, both in the padded order and in the one that the kernel sees.
            causal: as in `varlen_attention`; what it hides is drawn pale.
            window_size: likewise.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: the values are not known (tracing, fake tensors, CUDA graph capture).

        Example:
            >>> import torch
            >>> from varlen_prep import prepare_varlen
            >>> meta = prepare_varlen(2, 3, 4, torch.tensor([[True, True, True, False], [False, True, False, True]]))
            >>> figure = meta.plot()
            >>> [axes.get_title() for axes in figure.axes][2:]
            ['Padded order', 'Kernel order']
        """
        from .figure import plot

        return plot(self, ax, causal, window_size)
