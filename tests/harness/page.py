"""Examples of a document: its fenced blocks, and whether what was printed is what they say.

A `…` stands for anything within a line, alone in a line for any number of lines.
"""

import re

from harness.failure import need


def blocks(text):
    """(line, language, content) of each fenced block."""
    found, begin, language = [], None, ""
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if begin is None:
            begin, language = number, line[3:].strip()
        else:
            found.append((begin, language, "\n".join(lines[begin:number - 1])))
            begin = None
    need(begin is None, f"a block that begins in line {begin} has no end")
    return found


def pattern(expected):
    """A regular expression for what is printed. Blanks in a row count as one."""
    parts = []
    for line in expected.splitlines():
        words = " ".join(line.split())
        if words == "…":
            parts.append(r"(?:[^\n]*\n)*?")
        else:
            parts.append(r".*".join(re.escape(part).replace(r"\ ", " ?") for part in words.split("…")) + r"\n")
    return re.compile("".join(parts))


def squeezed(output):
    return "".join(" ".join(line.split()) + "\n" for line in output.splitlines())


def fits(expected, output):
    return pattern(expected).fullmatch(squeezed(output)) is not None
