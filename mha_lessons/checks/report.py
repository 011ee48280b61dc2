"""What a check tells the learner, as text and as rich text."""

import html
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """The result of a check; as the last line of a notebook's cell it shows itself.

    Args:
        passed: the answer is right.
        attempted: False while the stub still raises NotImplementedError.
        diagnosis: what is wrong and what to do, in plain sentences; `code` stands between backticks.
    """

    passed: bool
    attempted: bool
    diagnosis: str

    def __repr__(self) -> str:
        symbol, words, _ = self._headline()
        return f"{symbol} {words}. {self.diagnosis}"

    def _repr_html_(self) -> str:
        symbol, words, colour = self._headline()
        text = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(self.diagnosis))
        # Only the bar has a colour, one seen on white and on black; the text keeps the theme's own.
        style = f"border-left: 4px solid {colour}; padding: 0.2em 0.8em"
        return f'<div style="{style}"><strong>{symbol} {words}.</strong> {text}</div>'

    def _headline(self) -> tuple[str, str, str]:
        """Symbol, words and a colour that colour-blind readers can tell apart (Okabe and Ito)."""
        if self.passed:
            return "✓", "Passed", "#009e73"
        if self.attempted:
            return "✗", "Not yet", "#d55e00"
        return "○", "Not attempted yet", "#888888"
