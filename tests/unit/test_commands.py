"""Commands of the documents can be given as they stand: options and settings are there, and a test runs each kind."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup
from typer.exceptions import TyperException

from baton.config import Config, PoolConfig
from baton.config.load import NOT_SETTINGS, SHORT_NAMES
from deploy.cli.app import app
from tests.unit.test_docs import PAGES, ROOT
from tools.chart_docs import CHART_SECTIONS

FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^>]+) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
INLINE = re.compile(r"`((?:(?:\.venv/bin/)?baton|make)(?: [^`]*)?)`")
SHELL = {"", "sh", "bash"}
SETTINGS = {section.name: dataclasses.fields(section.default_factory) for section in dataclasses.fields(Config)}  # type: ignore[arg-type]
VARIABLES = {
    *(f"BATON_{section}_{field.name}".upper() for section, fields in SETTINGS.items() for field in fields),
    *SHORT_NAMES,
    *NOT_SETTINGS,
    "BATON_PYTHON",  # of the dev container
}
OF_POOLS = {"pools.prefill", "pools.decode"} | {f"pools.ROLE.{each.name}" for each in dataclasses.fields(PoolConfig)}
"""Settings in a section that is called as values of the chart are."""
COMMANDS = typer.main.get_command(app)
PLACEHOLDERS = {"N": "3", "L": "1.5", "--help": "", "HOST:PORT": "127.0.0.1:50051", "...": ""}
RUN_BY = {
    "make": "tests/integration/test_install.py",
    "curl": "tests/integration/test_examples.py",
    "buf": "tests/integration/test_real_model.py",
    "up": "tests/integration/cluster.py",
    "generate": "tests/integration/test_real_model.py",
    "scale": "tests/integration/test_scaling.py",
    "drain": "tests/integration/test_drain.py",
    "role": "tests/integration/test_scaling.py",
    "status": "tests/integration/test_plumbing.py",
    "autoscale": "tests/integration/test_autoscale.py",
    "doctor": "tests/integration/test_doctor.py",
    "bench": "tests/integration/test_bench.py",
    "simulate": "tests/integration/test_simulate.py",
    "requests": "tests/integration/test_explain.py",
    "config": "tests/integration/test_wheel.py",
    "chat": "tests/integration/test_wheel.py",
    "logs": "tests/unit/deploy/cli/test_look.py",
    "wake": "tests/integration/test_several_models.py",
}
"""What pages give without a mark, and the test that runs it whole, against processes."""
RUN_BLOCK_BY_BLOCK = {
    "docs/accounts.md": "tests/integration/test_accounts.py",
    "docs/tls.md": "tests/unit/baton/test_tls.py",
}
"""Pages from which a test takes the commands that it runs."""
NEEDED_BY_ALL_OF = {
    "deploy/docker/README.md": "docker",
    "docs/load-generators.md": "packages of others",
    "docs/runbook/": "a running cluster",
    "helm/baton/README.md": "a Kubernetes cluster",
    "tests/gpu/README.md": "an NVIDIA GPU",
}
"""Pages, and folders of pages, that say once for all of their commands what those need."""
ORDINARY = {"chmod", "git", "pre-commit", "python"}
"""Commands of any system, and those of the project's environment that no document explains."""


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """One command of a page, as words, and what the reader needs for it; empty: a machine."""

    page: Path
    words: tuple[str, ...]
    needs: str = ""
    is_fenced: bool = True

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands_of(page: Path) -> Iterator[Command]:
    """The shell commands in the fenced blocks of a page, and those of Baton within its text."""
    text = (ROOT / page).read_text()
    for fence in FENCE.finditer(text):
        if fence["kind"] in SHELL:
            for line in fence["text"].replace("\\\n", " ").splitlines():
                yield from (Command(page, words, fence["needs"] or "") for words in split(line))
    for code in INLINE.findall(FENCE.sub("", text)):
        yield from (Command(page, words, is_fenced=False) for words in split(code))


def split(line: str) -> Iterator[tuple[str, ...]]:
    """The words of each command of a line, without variables that are set for it and without what it writes into."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    try:
        found = list(lexer)
    except ValueError:  # a part of a longer text, such as a document that is written to a file
        return
    words: list[str] = []
    for word in [*found, ";"]:
        if set(word) <= set("|&;"):
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                yield tuple(words[: words.index(">")] if ">" in words else words)
            words = []
        else:
            words.append(word)


def of_baton(command: Command) -> bool:
    return command.words[0].removeprefix(".venv/bin/") == "baton"


ALL = [command for page in PAGES for command in commands_of(page)]


def parse(words: tuple[str, ...]) -> None:
    """Reads arguments as the command would, and runs nothing."""
    group, arguments = COMMANDS, [PLACEHOLDERS.get(word, word) for word in words]
    assert isinstance(group, TyperGroup)
    if not arguments or arguments[0].startswith("-"):
        group.make_context("baton", arguments, resilient_parsing=True)
        return
    command = group.commands[arguments[0]]
    is_whole = len(arguments) > 1 and "" not in arguments
    command.make_context(arguments[0], [word for word in arguments[1:] if word], resilient_parsing=not is_whole)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_of_baton_have_the_options_that_a_page_gives_them(page: Path) -> None:
    wrong = []
    for command in filter(of_baton, commands_of(page)):
        try:
            parse(command.words[1:])
        except (TyperException, KeyError) as error:
            wrong.append(f"{command}: {error}")
    assert wrong == []


def test_options_that_are_not_there_are_seen() -> None:
    with pytest.raises(TyperException, match="No such option"):
        parse(("scale", "decode", "3", "--patience"))
    with pytest.raises(KeyError):
        parse(("grow", "decode"))
    with pytest.raises(TyperException, match="valid integer"):
        parse(("scale", "decode", "many"))
    assert sum(map(of_baton, ALL)) > 100


def test_targets_of_make_are_there() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    given = {word for command in ALL if command.words[0] == "make" for word in command.words[1:] if "=" not in word}
    assert {"serve", "docs", "test"} <= given <= targets


def test_metrics_and_alerts_that_pages_name_are_there() -> None:
    known = (ROOT / "docs/metrics.md").read_text()
    made_of_each = r"(?:_(?:bucket|count|sum))?"
    for page in PAGES:
        text = re.sub(r"### Renamed\n(?s:.*?)(?=\n###)", "", (ROOT / page).read_text())  # names of before
        names = re.findall(rf"`((?:baton|gen_ai)_\w+?_\w+?){made_of_each}(?:{{[^`]*)?`", text)
        alerts = re.findall(r"\b(Baton(?:[A-Z][a-z]+){2,})\b", text)
        assert [name for name in names if f"`{name}`" not in known] == [], page
        assert [alert for alert in alerts if f"**{alert}**" not in known] == [], page


def test_values_of_the_chart_that_pages_name_are_there() -> None:
    chart = (ROOT / "helm/baton/README.md").read_text()
    ours = {
        "pools",
        "image",
        "worker",
        "ingress",
        "gateway",
        "networkPolicy",
        "modelCache",
        "huggingFace",
        "ray",
        "redis",
    }
    for page in (page for page in PAGES if page.parts[0] == "docs"):
        named = re.findall(r"`((?:\w+\.)+\w+)`", (ROOT / page).read_text())
        values = [name.replace(".decode.", ".ROLE.") for name in named if name.partition(".")[0] in ours]
        values = [value.replace(".prefill.", ".ROLE.") for value in values]
        values = [value for value in values if value not in OF_POOLS]
        assert [value for value in values if f"| `{value}" not in chart] == [], page


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_settings_that_a_page_names_are_there(page: Path) -> None:
    text = (ROOT / page).read_text()
    assert set(re.findall(r"\bBATON_[A-Z_]*[A-Z]\b", text)) - VARIABLES - {"BATON_SECTION_FIELD"} == set()
    if page.parts[0] == "docs":
        named = re.findall(r"`(?:config\.)?(\w+)\.(\w+)(?:: [^`]*)?`", text)
        ours = {(section, name) for section, name in named if section in SETTINGS.keys() - CHART_SECTIONS}
        assert {f"{section}.{name}" for section, name in ours} - known_names() == set()


def known_names() -> set[str]:
    """Settings, and values of the chart in sections of the same name."""
    chart = re.findall(r"^\| `(\w+\.\w+)[`.]", (ROOT / "helm/baton/README.md").read_text(), re.MULTILINE)
    return {f"{section}.{field.name}" for section, fields in SETTINGS.items() for field in fields} | set(chart)


def kind_of(command: Command) -> str:
    """The first word; of Baton's commands the second."""
    if of_baton(command):
        return command.words[1] if len(command.words) > 1 else "baton"
    return command.words[0].rpartition("/")[2]


def test_a_page_says_what_a_command_needs_unless_a_test_runs_it() -> None:
    apart = (*NEEDED_BY_ALL_OF, *RUN_BLOCK_BY_BLOCK)
    unmarked = [each for each in ALL if not each.needs and not each.page.as_posix().startswith(apart)]
    known = {*RUN_BY, *ORDINARY}
    assert [str(each) for each in unmarked if not of_baton(each) and kind_of(each) not in known] == [], (
        "put <!-- needs: ... --> before the block, or name the test that runs such commands in RUN_BY"
    )
    assert {kind_of(each) for each in unmarked if of_baton(each) and each.is_fenced} <= {*known, "baton", "keys"}


def test_the_tests_that_run_commands_do_so() -> None:
    for kind, test in RUN_BY.items():
        assert f'"{kind}"' in (ROOT / test).read_text(), f"{test} does not run {kind}"
    for page, test in RUN_BLOCK_BY_BLOCK.items():
        assert Path(page).name in (ROOT / test).read_text(), f"{test} does not read {page}"


def test_addresses_that_curl_asks_are_served() -> None:
    urls = [word for each in ALL if each.words[0] == "curl" for word in each.words if "://" in word]
    served = (ROOT / "docs/http.md").read_text()
    paths = {re.sub(r"^\w+://[^/]+", "", url).partition("?")[0] for url in urls}
    assert len(paths) > 3
    assert [path for path in paths if f"{path}`" not in served] == []


def test_charts_files_and_values_that_helm_is_given_are_there() -> None:
    helm = [each for each in ALL if each.words[0] == "helm"]
    chart = (ROOT / "helm/baton/README.md").read_text()
    keys = {re.split(r"[=\[]", word)[0] for each in helm for word in each.words if re.match(r"[a-z][\w.\[\]]+=", word)}
    files = {word for each in helm for word in each.words if word.startswith("helm/")}
    assert {"image.router.repository", "tls.issuer.name"} <= keys
    wholes = {key: ["", *(key[: dot.start()] for dot in re.finditer(r"\.", key)), key] for key in keys}
    assert [key for key, names in wholes.items() if not any(f"| `{name}` |" in chart for name in names)] == []
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_readme_is_short_and_every_need_is_named() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
    assert {command.needs for command in ALL} <= {
        "",
        "3 GB of packages from PyPI",
        "Claude Code",
        "a Kubernetes cluster",
        "a Ray cluster and a Redis",
        "a cluster in trouble",
        "an NVIDIA GPU",
        "an environment with vLLM",
        "docker",
        "docker and a registry",
        "the folder of a model",
        "two NVIDIA GPUs or more",
    }
