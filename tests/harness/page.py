"""Examples of a document: its fenced blocks, and whether what was printed is what they say.

A `…` stands for anything within a line, alone in a line for any number of lines.
"""

import re

import pytest

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


def examples(found, document):
    """Each block of commands with what it is to print, and the files that stand before it."""
    files = []
    for index, (line, language, content) in enumerate(found):
        following = found[index + 1] if index + 1 < len(found) else (0, "-", "")
        if language == "yaml":
            files.append(content)
        elif language == "sh":
            yield pytest.param(files, content, following[2] if following[1] == "" else None, id=f"{document}:{line}")
            files = []
        else:
            need(language == "" and index > 0 and found[index - 1][1] == "sh", f"line {line}: what is this block?")


def write(directory, content):
    """A YAML block, as the file that it names."""
    name = re.match(r"# (\S+\.yaml)\n", content)
    need(name, "a YAML block does not begin with `# NAME.yaml`")
    (directory / name[1]).write_text(content + "\n")
