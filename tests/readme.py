"""The commands of README.md that CI executes: ``python tests/readme.py demo`` prints one.

A command is the only line of the code block that follows its marker, ``<!-- command: NAME -->``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(name: str, text: str | None = None) -> str:
    """Return the command that ``text`` (default: README.md) marks with ``name``.

    Raises
    ------
    LookupError
        If the text does not mark exactly one command of one line by that name.
    """
    text = README.read_text(encoding="utf-8") if text is None else text
    blocks = re.findall(rf"<!-- command: {re.escape(name)} -->\n+```bash\n(.*?)\n```", text, re.DOTALL)
    if len(blocks) != 1 or "\n" in blocks[0] or text.count(f"<!-- command: {name} -->") != 1:
        raise LookupError(f"README.md must mark exactly one command of one line as {name!r}, found {blocks}")
    return blocks[0]


if __name__ == "__main__":
    print(command(sys.argv[1]))
