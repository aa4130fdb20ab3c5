"""The documents match the code: snippets, job files, commands, fields, headings.

Python blocks compile; those whose fence says `python runnable` run, alone, as rank 0 of 1.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from paceline.cli.main import app
from paceline.core.faults import parse_faults
from paceline_api.reading.load import load_job
from paceline_api.reading.overrides import with_overrides

from testing.processes.forked_call import ForkedCall
from testing.processes.runs import end_of

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*/*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"(?:^    \S.*\n)+", re.M)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(language: str) -> Iterator[tuple[str, str]]:
    """Yield the location and text of each fenced block whose info string is `language`."""
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1].strip() == language:
                line = text.count("\n", 0, match.start()) + 1
                yield f"{name_of(page)}:{line}", match[2]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield page and words of each `paceline ...` in a block or between backticks."""
    for page in PAGES:
        text = page.read_text()
        parts = [match[0] for match in INDENTED.finditer(text)]
        parts += [match[2] for match in FENCE.finditer(text) if match[1].strip() in ("", "sh")]
        inline = re.findall(r"`(paceline [^`]*)`", text)
        lines = "\n".join(parts).replace("\\\n", " ").splitlines()
        for line in [*lines, *inline]:
            words = line.split("|")[0].split("#")[0].split()
            words = words[next((i for i, w in enumerate(words) if "=" not in w), len(words)) :]
            if words[:1] == ["paceline"] and len(words) > 1 and words[1].isalpha():
                yield name_of(page), words[1:]


RUNNABLE = list(blocks("python runnable"))
SNIPPETS = [*blocks("python"), *RUNNABLE]


def test_snippets_and_commands_are_found_in_the_documents() -> None:
    assert len(SNIPPETS) >= 5
    assert len(RUNNABLE) >= 3
    assert len(list(commands())) >= 20


@pytest.mark.parametrize(("where", "code"), SNIPPETS, ids=[where for where, _ in SNIPPETS])
def test_python_snippets_compile(where: str, code: str) -> None:
    compile(code, where, "exec")


@pytest.mark.processes
@pytest.mark.parametrize(("where", "code"), RUNNABLE, ids=[where for where, _ in RUNNABLE])
def test_runnable_python_snippets_run(where: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(code)
    # The variables of a torchrun with one process, for scripts that make a process group.
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = os.environ | group | {"EPOCHS": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    status, output = end_of(ForkedCall(["script.py"], tmp_path, env, "python"))
    assert status == 0, f"{where}\n{output}"


def test_get_started_shows_the_files_of_the_example() -> None:
    page = (ROOT / "docs/get-started.md").read_text()
    script = (ROOT / "examples/first/train.py").read_text()
    assert script.partition('"""\n\n')[2] in page, "docs/get-started.md shows another train.py"
    assert (ROOT / "examples/first/job.yaml").read_text() in page, "... another job.yaml"


def test_job_files_in_the_documents_are_valid(tmp_path: Path) -> None:
    for where, text in blocks("yaml"):
        if isinstance(given := yaml.safe_load(text), dict) and given.get("kind") == "TrainingJob":
            (tmp_path / "job.yaml").write_text(text)
            assert load_job(tmp_path / "job.yaml", []), where


def test_commands_in_the_documents_exist_with_their_options() -> None:
    group: Any = typer.main.get_command(app)
    wrong = []
    for where, (name, *words) in commands():
        command = group.commands.get(name)
        if command is None:
            wrong.append(f"{where}: paceline {name}")
            continue
        known = {option for each in command.params for option in each.opts} | {"--help"}
        wrong += [
            f"{where}: paceline {name} {word}"
            for word in takewhile(lambda word: not word.endswith(".py"), words)
            if word.startswith("--") and word.rstrip(",") not in known
        ]
    assert not wrong, wrong


def test_faults_and_settings_of_commands_are_valid() -> None:
    job = (ROOT / "examples/first/job.yaml").read_text()
    for where, words in commands():
        for option, value in pairwise(words):
            if option == "--inject":
                assert parse_faults(value), where
            if option == "--set" and value != "PATH=VALUE":
                assert with_overrides(yaml.safe_load(job), [value]), where


def slug(heading: str) -> str:
    """Return the anchor that GitHub makes from a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def test_links_to_headings_have_a_target() -> None:
    wrong = []
    for page in PAGES:
        for to, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", page.read_text()):
            target = (page.parent / to) if to else page
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            if anchor not in map(slug, headings):
                wrong.append(f"{name_of(page)}: {to}#{anchor}")
    assert not wrong, wrong


def test_the_index_of_the_documents_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    missing = [page for page in sorted(pages - {"README.md"}) if f"({page})" not in index]
    assert not missing, f"name them in docs/README.md: {missing}"
