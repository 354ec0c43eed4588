"""A model's thought, apart from what it says then. One file is one form of thoughts, as models write them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """A thought between two marks; a file defines one as ``PARSER``."""

    begin: str
    """Stands before it, in the answer or at the end of the prompt."""
    end: str

    def split(self, text: str, is_begun: bool, is_whole: bool) -> tuple[str, str]:
        """Return the thought and the answer, without white space between. ``is_begun``: the prompt ends with `begin`.

        Of a text that is not ``is_whole`` they only grow with it: what may become a mark belongs to neither.
        """
        said = text.lstrip()
        if not is_whole and self.begin.startswith(said):
            return "", ""
        if not is_begun and not said.startswith(self.begin):
            return "", text
        thought, end, answer = said.removeprefix(self.begin).partition(self.end)
        if not end and not is_whole:
            thought = thought[: len(thought) - overlap(thought, self.end)]
        return thought.strip(), answer.lstrip()


def overlap(text: str, string: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(string[:count])), 0)
