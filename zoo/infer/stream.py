"""The text of one row while it grows: whole characters only, and nothing of a stop string."""

from collections.abc import Iterable, Sequence

from zoo.data.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Turns tokens into pieces of text that can be shown at once; the pieces add up to `text`.

    What may be the beginning of a stop string, or of a character, is held back until it is known not to be one.

    Attributes:
        text: what was shown so far.
        stopped: a stop string has come; the text ends before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Iterable[int], stop: Sequence[str] = ()):
        self._decoder = StreamDecoder(tokenizer)
        # What follows a prompt may begin with a space that would be dropped at the beginning of a text.
        self._decoder.push(*prompt)
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The piece of text that this token completes, perhaps empty."""
        return self._show(self._decoder.push(token), last=False)

    def finish(self) -> str:
        """What was held back, at the end of the row."""
        return self._show(self._decoder.flush(), last=True)

    def _show(self, new: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._held += new
        cut = first_stop(self._held, self._stop)
        self.stopped = cut is not None
        if cut is None:
            cut = len(self._held) - (0 if last else possible_stop(self._held, self._stop))
        piece, self._held = self._held[:cut], self._held[cut:]
        self.text += piece
        return piece


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is the first to be complete, or None.

    The first to be complete, rather than the first to begin, so that the cut does not depend on how the text
    was divided into tokens.
    """
    found = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    return min(found)[1] if found else None


def possible_stop(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a stop string."""
    longest = max((len(s) - 1 for s in stop), default=0)
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
