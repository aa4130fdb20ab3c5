"""Rules of the repository that need no reviewer, each with its remedy."""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from scripts.layers import tree_of

# These tests parse all sources, which takes seconds.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent
SKIPPED_FOLDERS = {"runs", "dist", "site", "__pycache__"}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".json", ".cfg", ""}

# The shim runs before Paceline can be imported; everything else calls the clock module.
MAY_SLEEP = {"runtime/paceline/clock.py", "runtime/paceline/agent/shim.py"}
MAY_PRINT = (
    *("runtime/paceline/cli/", "examples/", "benchmarks/", "scripts/", "testing/", "tests/"),
)
MAY_NAME_ENVIRONMENT = {
    "crds/paceline_api/names.py",
    "runtime/paceline/environment.py",
    "runtime/paceline/agent/shim.py",
}
RETIRED = {
    "bank": "accumulate",
    "banked": "accumulated",
    "banking": "accumulating",
    "buried": "abandoned",
    "bury": "abandon, or declare dead",
    "diary": "history",
    "grave": "abandoned call",
    "graves": "abandoned requests",
    "lifeline": "peer connection",
    "lifelines": "peer connections",
    "mailbox": "peer sockets",
    "meeting": "rendezvous",
    "nursery": "fork server",
}
"""Private words of earlier versions, with the words of docs/glossary.md that replace them."""
MAY_SHARE_A_NAME = {
    "Tick": "the event of each state machine that its time has come",
    "WakeAt": "the effect of each state machine that asks for its Tick",
    "Hashed": "an event of a rank, and its entry in the journal",
}
"""Names of classes that stand for one meaning in more than one module, with that meaning."""
PURE_TESTS = ("testing/simulation/", "tests/api/", "tests/core/", "tests/sim/")
GENERATED = ("crds/manifests", "docs/pictures", "docs/reference")
LEFTOVERS = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X])\b|^(<{7}|>{7}) |\bbreakpoin[t]\(", re.M)
# Nodes of GKE have their GPU libraries in the home folder of a user kubernetes.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:root|work|home(?!/kubernetes/bin/))/\w+")
PUBLIC_INDEX = re.compile(r"https://(?:pypi\.org/simple|files\.pythonhosted\.org/\S+)$")


@cache
def files() -> tuple[Path, ...]:
    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            hidden = path.name.startswith(".") and path.name != ".ci"
            if hidden or path.name in SKIPPED_FOLDERS or path.is_symlink():
                continue
            if path.is_dir():
                yield from walk(path)
            elif path.suffix in TEXT_SUFFIXES:
                yield path

    return tuple(walk(ROOT))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every Python file of the repository, by file name."""
    return {name_of(p): tree_of(p) for p in files() if p.suffix == ".py"}


def product() -> dict[str, ast.Module]:
    roots = ("crds/", "runtime/", "operator/")
    return {name: tree for name, tree in sources().items() if name.startswith(roots)}


def calls(trees: dict[str, ast.Module], what: str) -> list[str]:
    """Return the places where `what` is called."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == what
    ]


def none_of(wrong: Iterable[str], remedy: str) -> None:
    lines = "\n  ".join(wrong)
    assert not lines, f"{remedy}\n  {lines}"


def test_every_module_has_a_docstring() -> None:
    none_of(
        (name for name, tree in sources().items() if tree.body and not ast.get_docstring(tree)),
        "Say in a docstring what these files are responsible for:",
    )


def test_only_the_command_line_prints() -> None:
    quiet = {name: tree for name, tree in sources().items() if not name.startswith(MAY_PRINT)}
    none_of(calls(quiet, "print"), "Log, or return the text to who asked:")


def test_only_the_clock_and_the_shim_sleep() -> None:
    awake = {name: tree for name, tree in product().items() if name not in MAY_SLEEP}
    none_of(calls(awake, "time.sleep"), "Wait for the event, or use paceline.clock:")


def test_tests_of_pure_code_do_not_import_time() -> None:
    def imports_time(node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return any(alias.name == "time" for alias in node.names)
        return isinstance(node, ast.ImportFrom) and node.module == "time"

    none_of(
        (
            name
            for name, tree in sources().items()
            if name.startswith(PURE_TESTS) and any(map(imports_time, ast.walk(tree)))
        ),
        "Pure code has no clock to wait for; give it the time as an argument:",
    )


def test_no_test_module_is_imported_from_another_folder() -> None:
    imports = re.compile(r"^\s*from (tests\.(?:\w+\.)*)(test_\w+) import", re.M)
    none_of(
        (
            f"{name}: {folder}{module}"
            for path in files()
            if (name := name_of(path)).startswith(("tests/", "testing/")) and path.suffix == ".py"
            for folder, module in imports.findall(path.read_text())
            if folder.replace(".", "/") != f"{name.rpartition('/')[0]}/"
        ),
        "Move what several folders share into testing/:",
    )


def test_environment_variables_are_named_in_designated_modules() -> None:
    none_of(
        (
            f"{name}:{node.lineno}: {node.value}"
            for name, tree in product().items()
            if name not in MAY_NAME_ENVIRONMENT
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"PACELINE_[A-Z_]+", node.value)
        ),
        "These are named in paceline_api.names or paceline.environment; take them from there:",
    )


def test_no_broad_exception_handler_is_silent() -> None:
    def swallows(node: ast.AST) -> bool:
        if not isinstance(node, ast.ExceptHandler):
            return False
        kind = ast.unparse(node.type) if node.type else ""
        silent = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
        return silent and kind in ("Exception", "BaseException", "")

    none_of(
        (
            f"{name}:{getattr(node, 'lineno', 0)}"
            for name, tree in product().items()
            for node in ast.walk(tree)
            if swallows(node)
        ),
        "Name the error that is expected here, or report it:",
    )


@pytest.mark.parametrize("folder", ["operator", "tests"])
def test_operator_and_tests_have_no_init_files(folder: str) -> None:
    """A package `operator` would shadow the standard library; tests are collected by path."""
    inits = [*(ROOT / folder).glob("__init__.py")]
    if folder == "tests":
        inits = [*(ROOT / folder).rglob("__init__.py")]
    assert not inits, f"delete {[name_of(path) for path in inits]}"


def search(pattern: re.Pattern[str]) -> list[str]:
    texts = [(name_of(path), path.read_text()) for path in files() if path.name != "uv.lock"]
    hits = [(name, pattern.search(text)) for name, text in texts]
    return [f"{name}: {match.group()!r}" for name, match in hits if match]


def test_no_todo_markers_or_breakpoints_are_left() -> None:
    none_of(search(LEFTOVERS), "Do it, or file an issue and leave the comment out:")


def test_no_file_contains_paths_of_one_machine() -> None:
    none_of(search(MACHINE_PATHS), "These paths exist on one machine only:")


def test_the_lock_file_uses_the_public_index_only() -> None:
    urls = set(re.findall(r'"(https?://[^"]+)"', (ROOT / "uv.lock").read_text()))
    assert urls
    none_of(
        (url for url in urls if not PUBLIC_INDEX.match(url)),
        "Lock again without the settings of a mirror; uv.lock names:",
    )


@pytest.mark.parametrize("folder", GENERATED)
def test_generated_files_name_their_generator(folder: str) -> None:
    paths = [path for path in (ROOT / folder).iterdir() if path.is_file()]
    assert paths, f"{folder} is empty: make generate"
    for path in paths:
        head = path.read_text()[:400]
        assert "Generated" in head, f"{name_of(path)}: name the generator in its first lines"
        assert "do not edit" in head, f"{name_of(path)}: say in its first lines: do not edit"


def test_the_architecture_page_names_every_package() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    folders = {name.rpartition("/")[0] for name in product()}
    none_of(
        (folder for folder in sorted(folders) if f"{folder.rpartition('/')[2]}/" not in text),
        "docs/architecture.md does not name:",
    )


def test_every_dependency_has_a_documented_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    wanted += [requirement for extra in extras for requirement in extra]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in wanted} - {"paceline"}
    text = (ROOT / "docs/dependencies.md").read_text()
    none_of(
        (name for name in sorted(names) if f"| {name} |" not in text),
        "docs/dependencies.md does not say why these are needed:",
    )


def test_links_files_and_make_targets_in_documents_exist() -> None:
    """Check links, files in backticks and make targets."""
    makefiles = [(ROOT / name).read_text() for name in ("Makefile", "testing/cluster/cluster.mk")]
    targets = set(re.findall(r"^([a-z-]+):", "\n".join(makefiles), re.M))
    wrong = []
    for path in (path for path in files() if path.suffix == ".md"):
        text, name = path.read_text(), name_of(path)
        links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
        wrong += [f"{name}: link {to}" for to in links if not (path.parent / to).exists()]
        named = re.findall(
            r"`((?:crds|runtime|testing|tests|docs|examples|scripts)/[\w./-]+)`", text
        )
        wrong += [f"{name}: {to}" for to in named if not (ROOT / to).exists()]
        if name == "docs/protocol.md":
            short = re.findall(r"`((?:[a-z]+/)?[a-z]+\.py)`", text)
            core = ROOT / "runtime/paceline/core"
            wrong += [f"{name}: {to}" for to in short if not (core / to).exists()]
        made = re.findall(r"`make ([a-z-]+)`", text)
        wrong += [f"{name}: make {target}" for target in made if target not in targets]
    none_of(wrong, "Documents name what does not exist:")


def test_files_and_tests_named_by_design_pages_exist() -> None:
    """The pages name a file by the end of its path, and a test by its name."""
    names = [f"/{name_of(path)}" for path in files()]
    names += [f"/{name_of(path)}" for path in (ROOT / "runtime").rglob("*.c")]
    tests = {
        node.name
        for name, tree in sources().items()
        if name.startswith("tests/")
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }
    wrong = []
    for page in (ROOT / "docs/architecture.md", *sorted((ROOT / "docs/design").glob("*.md"))):
        text, name = page.read_text(), name_of(page)
        code = set(re.findall(r"`([\w/-]+\.(?:py|c|yaml))`", text))
        wrong += [f"{name}: {to}" for to in code if not any(n.endswith(f"/{to}") for n in names)]
        named = set(re.findall(r"`(test_\w+)`", text))
        wrong += [f"{name}: {test}" for test in sorted(named - tests)]
    none_of(wrong, "Name what implements the decision now, and what holds it:")


def words_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and word of names, comments and docstrings; other strings may be wire names."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            kept = token.type in (tokenize.NAME, tokenize.COMMENT) or token.string.startswith('"""')
            for word in re.findall("[A-Z]?[a-z]+|[A-Z]+", token.string) if kept else ():
                yield token.start[0], word.lower()


def test_tools_use_testing_temporary_for_temporary_folders() -> None:
    """Files made beside their target (`dir=`) are not in the temporary folder."""
    tools = ("benchmarks/", "scripts/", "testing/")
    made = ("TemporaryDirectory", "mkdtemp", "mkstemp", "NamedTemporaryFile")
    none_of(
        (
            f"{name}:{node.lineno}"
            for name, tree in sources().items()
            if name.startswith(tools) and name != "testing/temporary.py"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).rpartition(".")[2] in made
            and not any(given.arg == "dir" for given in node.keywords)
        ),
        "Use testing.temporary, whose folders go even if their owner is killed:",
    )


def test_retired_words_are_not_used_in_the_product() -> None:
    none_of(
        (
            f"{name}:{line}: {word} (say: {RETIRED[word]})"
            for name in product()
            for line, word in words_of(ROOT / name)
            if word in RETIRED
        ),
        "Use the word of docs/glossary.md:",
    )


def test_public_classes_of_the_product_have_names_of_their_own() -> None:
    modules: dict[str, list[str]] = {}
    for name, tree in product().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules.setdefault(node.name, []).append(name)
    shared = {name: places for name, places in modules.items() if len(places) > 1}
    assert MAY_SHARE_A_NAME.keys() <= shared.keys(), "a name is not shared any more"
    none_of(
        [f"{name}: {places}" for name, places in shared.items() if name not in MAY_SHARE_A_NAME],
        "name the class after what it is in its package, such as BackoffVerdict",
    )


def test_the_glossary_lists_each_word_once() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", (ROOT / "docs/glossary.md").read_text(), re.M)
    words = [word for row in rows for word in row.split(", ")]
    none_of((w for w in sorted(set(words)) if words.count(w) > 1), "One word, one meaning:")


def test_files_named_by_the_glossary_exist() -> None:
    """Short paths are below runtime/paceline/; whole paths are checked with all documents."""
    named = re.findall(r"`([a-z_]+(?:/[\w.]+)+)`", (ROOT / "docs/glossary.md").read_text())
    assert named
    none_of(
        (
            name
            for name in named
            if not (ROOT / "runtime/paceline" / name).exists() and not (ROOT / name).exists()
        ),
        "docs/glossary.md names what does not exist:",
    )


def test_every_part_of_the_runtime_has_an_import_layer() -> None:
    contracts = (ROOT / ".importlinter").read_text()
    parts = {name.split("/")[2].removesuffix(".py") for name in product() if "runtime/" in name}
    none_of(
        (part for part in sorted(parts - {"__init__"}) if f"paceline.{part}" not in contracts),
        "Give these their place among the layers of .importlinter:",
    )
