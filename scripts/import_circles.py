"""The largest import circle of a Rust crate: files are nodes, paths into other files of the crate are arrows.

It reads text, not the compiler's view: comments, strings and test modules are left out, re-exports (`pub use`) are followed
to the file that they name and are no arrow of the file that they stand in. Paths count in `use` and in code, if they begin
with `crate`, `self`, `super` or a module of the file. A method called on another file's type is no arrow of its own: the
type's name is in a path somewhere.
"""

import pathlib
import re

NAME = r"(?:r#)?[A-Za-z_][A-Za-z0-9_]*"
VISIBLE = r"(?:pub(?:\([^)]*\))?\s+)?"
# Strings before comments, since "//" may stand in a string; a quote that begins no character is a lifetime's.
STRING_OR_COMMENT = re.compile(
    r'b?r(#*)"(?:.|\n)*?"\1|b?"(?:\\(?:.|\n)|[^"\\])*"|\'(?:\\[^\']+|[^\\\'])\'|//[^\n]*|/\*(?:.|\n)*?\*/')
TEST_ATTRIBUTE = re.compile(r"#\[cfg\(((?:all\()?test\b|all\([^]]*\btest\)|loom\b|all\(loom)[^]]*\]")


class Module:
    """One file's module. An inline module is a part of its file."""

    def __init__(self, file, parent, name):
        self.file, self.parent, self.name = file, parent, name
        self.children = {}
        self.aliases = {}  # name that `pub use` gives -> path as a list of segments
        self.globs = []
        self.uses = []  # paths as lists of segments
        self.text = ""
        self.code = ""


def without_strings_and_comments(text):
    return STRING_OR_COMMENT.sub(lambda match: "\n" * match.group().count("\n") + " ", text)


def end_of_block(text, position):
    """Behind the brace that closes the first one at or after `position`, or behind a semicolon that comes before it."""
    depth = 0
    for match in re.compile(r"[{};]").finditer(text, position):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
        if depth == 0:
            return match.end()
    return len(text)


def without_tests(text):
    """Without what only tests see: items under `#[cfg(test)]` and the like, declared modules included."""
    while match := TEST_ATTRIBUTE.search(text):
        text = text[:match.start()] + text[end_of_block(text, match.end()):]
    return text


def without_inline_module_walls(text):
    """`super::` in an inline module is the file itself."""
    for match in reversed(list(re.finditer(rf"\bmod\s+{NAME}\s*\{{", text))):
        end = end_of_block(text, match.start())
        inner = re.sub(r"\bsuper::(?!super)", "self::", text[match.end():end - 1])
        text = text[:match.start()] + inner + text[end:]
    return text


def expand(tree, prefix=()):
    """The paths of one `use` tree, each with the name that it gives."""
    tree = tree.strip()
    if match := re.match(r"((?:[^{},]|\s)*?)\{(.*)\}$", tree, re.DOTALL):
        prefix = prefix + tuple(part.strip() for part in match.group(1).split("::") if part.strip())
        depth, begin, inner = 0, 0, match.group(2) + ","
        for position, letter in enumerate(inner):
            depth += (letter == "{") - (letter == "}")
            if letter == "," and depth == 0:
                if inner[begin:position].strip():
                    yield from expand(inner[begin:position], prefix)
                begin = position + 1
        return
    path, _, alias = tree.partition(" as ")
    segments = [*prefix, *(part.strip() for part in path.split("::") if part.strip())]
    if segments and segments[-1] == "self" and len(segments) > 1:
        segments.pop()
    yield segments, alias.strip() or segments[-1]


def load(file, folder, parent, name):
    """The module of a file, with those that it declares. `folder` is where its children lie."""
    module = Module(file, parent, name)
    raw = file.read_text()
    # Where a path attribute leads to is a file of this crate too, if it is below the same root.
    text = without_tests(without_strings_and_comments(re.sub(r'(#\[path = )"([^"]*)"', r"\1<\2>", raw)))
    declared = re.compile(rf"(?:#\[path = <([^>]*)>\s*\]\s*)?{VISIBLE}mod\s+({NAME})\s*;")
    for match in declared.finditer(text):
        child = match.group(2)
        places = [file.parent / match.group(1)] if match.group(1) else \
            [folder / f"{child}.rs", folder / child / "mod.rs"]
        for place in places:
            if place.is_file():
                below = place.parent if place.name == "mod.rs" else place.parent / place.stem
                module.children[child] = load(place.resolve(), below, module, child)
    text = without_inline_module_walls(declared.sub("", text))

    def use(match):
        for segments, given in expand(match.group(2)):
            if segments[-1] == "*":
                (module.globs if match.group(1) else module.uses).append(segments[:-1])
            elif match.group(1):
                module.aliases[given] = segments
            else:
                module.uses.append(segments)
        return ""

    module.code = re.sub(rf"(?m)^\s*(pub(?:\([^)]*\))?\s+)?use\s+([^;]*);", use, text)
    for match in re.finditer(rf"(?<![\w:]){NAME}(?:\s*::\s*{NAME})+", module.code):
        module.uses.append(re.split(r"\s*::\s*", match.group()))
    return module


def defines(module, name):
    return name in module.children or name in module.aliases or \
        re.search(rf"\b(?:fn|struct|enum|union|trait|const|static|type|macro_rules!)\s+(?:mut\s+)?{name}\b", module.code)


def resolve(root, module, segments, depth=0):
    """The module that a path leads into, or None if it leaves the crate."""
    segments = list(segments)
    if segments[0] in ("crate", "self", "super"):
        first = segments.pop(0)
        here = root if first == "crate" else module if first == "self" else module.parent
        while segments and segments[0] == "super" and here:
            here = here.parent
            segments.pop(0)
    elif segments[0] in module.children:
        here = module
    else:
        return None
    while here and segments:
        name = segments[0]
        if name in here.children:
            here = here.children[name]
        elif depth < 8 and name in here.aliases:
            return resolve(root, here, here.aliases[name] + segments[1:], depth + 1) or here
        else:
            for glob in here.globs if depth < 8 else []:
                target = resolve(root, here, glob, depth + 1)
                if target and target is not here and defines(target, name):
                    return resolve(root, target, ["self", *segments], depth + 1)
            return here
        segments.pop(0)
    return here


def modules(root):
    yield root
    for child in root.children.values():
        yield from modules(child)


def arrows(root_file):
    """{file: files that it names} of the crate whose root this is."""
    root = load(root_file.resolve(), root_file.resolve().parent, None, "crate")
    found = {module.file: set() for module in modules(root)}
    for module in modules(root):
        for segments in module.uses:
            target = resolve(root, module, segments)
            if target and target.file != module.file:
                found[module.file].add(target.file)
    return found


def circles(graph):
    """Strongly connected components of more than one node, the largest first (Tarjan's, without recursion)."""
    index, low, on_stack, stack, found = {}, {}, set(), [], []
    for start in graph:
        if start in index:
            continue
        work = [(start, iter(sorted(graph[start])))]
        index[start] = low[start] = len(index)
        stack.append(start)
        on_stack.add(start)
        while work:
            node, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                        on_stack.discard(component[-1])
                    if len(component) > 1:
                        found.append(sorted(component))
            elif following not in index:
                index[following] = low[following] = len(index)
                stack.append(following)
                on_stack.add(following)
                work.append((following, iter(sorted(graph[following]))))
            elif following in on_stack:
                low[node] = min(low[node], index[following])
    return sorted(found, key=len, reverse=True)


def of_crate(folder):
    """The circles of all roots of a crate (its library, its program), the largest first."""
    roots = [folder / "src" / name for name in ("lib.rs", "main.rs")]
    found = [circle for root in roots if root.is_file() for circle in circles(arrows(root))]
    return sorted(found, key=len, reverse=True)

