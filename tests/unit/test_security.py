"""SECURITY.md names every endpoint, and for each promise a test that holds it."""

from __future__ import annotations

import ast
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil

from deploy.embedded_redis import EmbeddedRedis
from tests.unit.test_house import nodes_of, tree_of

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()
HELD = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
PRODUCT = ("baton", "engine", "kvstore", "router", "prefill_worker", "decode_worker", "worker", "deploy", "lab")


def rows(heading: str) -> list[list[str]]:
    """The cells of every table row below the heading, without the tables' own heads."""
    _, _, behind = TEXT.partition(f"\n## {heading}\n")
    lines = [line for line in behind.partition("\n## ")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set(row[0]) <= {"-"} and row[0] not in ("Endpoint", "Promise")]


def test_every_promise_names_tests_that_are_there() -> None:
    promises = rows("Promises")
    assert len(promises) >= 15
    for promise, held_by in promises:
        named = HELD.findall(held_by)
        assert named, promise
        assert HELD.sub("", held_by).strip(", ") == "", promise
        for path, test in named:
            body = tree_of(ROOT / path).body
            found = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert test in found, f"{promise} {path} has no {test}"


def test_every_service_and_every_address_of_the_settings_is_an_endpoint() -> None:
    endpoints = " ".join(row[0] for row in rows("Endpoints"))
    for path in (ROOT / "proto").rglob("*.proto"):
        for service in re.findall(r"^service (\w+)", path.read_text(), re.MULTILINE):
            assert f"`{service}`" in endpoints, service
    assert {"/v1", "/metrics", "/healthz", "/readyz"} <= set(re.findall(r"/\w+", endpoints))
    assert all(len(row) == 5 and row[0] and row[1] and row[4] for row in rows("Endpoints"))


def dotted(called: ast.expr) -> str:
    """A name and names behind it, as written; empty for what is no such thing."""
    match called:
        case ast.Name(name):
            return name
        case ast.Attribute(inner, name) if before := dotted(inner):
            return f"{before}.{name}"
    return ""


def calls(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """The dotted name of what is called, and the arguments that are True."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            true = {
                word.arg
                for word in node.keywords
                if word.arg and isinstance(word.value, ast.Constant) and word.value.value is True
            }
            yield dotted(node.func), true


FORBIDDEN = re.compile(
    r"eval|exec|compile|(pickle|marshal|shelve|dill|cloudpickle)\.\w+|torch\.load|yaml\.(load|unsafe_load|full_load)"
    r"|os\.(system|popen)|jinja2\.(Environment|Template)|subprocess\.(getoutput|getstatusoutput)"
)


def test_nothing_that_is_received_is_run() -> None:
    found, num_calls = [], 0
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            for called, true in calls(tree_of(path)):
                num_calls += 1
                if FORBIDDEN.fullmatch(called) or true & {"shell", "trust_remote_code"}:
                    found.append(f"{path.relative_to(ROOT)}: {called}")
    assert num_calls > 10_000
    assert found == []
    bad = "eval(x); torch.load(f); pickle.loads(b); run(c, shell=True); model.eval(); re.compile(p); yaml.safe_load(f)"
    seen = [called for called, true in calls(ast.parse(bad)) if FORBIDDEN.fullmatch(called) or true & {"shell"}]
    assert seen == ["eval", "torch.load", "pickle.loads", "run"]


READS_MODELS = ("engine/model/pretrained.py", "engine/model/asking.py")
LOADS = re.compile("from transformers|from_pretrained|from_config")
"""What every file has that `unsafe_loads` finds something in. Reading the syntax of all of them takes seconds."""


def unsafe_loads(path: str, tree: ast.AST) -> Iterator[str]:
    """What has transformers read a model's folder elsewhere than at the two places, or does not say that its code is
    not run. Tests may read a folder, and make a model of a configuration.
    """
    is_product = not path.startswith("tests/")
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("transformers"):
                taken = [each.name for each in names if each.name.startswith("Auto") or each.name == "pipeline"]
                if taken and is_product and path not in READS_MODELS:
                    yield f"{path}: imports {taken[0]}"
            case ast.Call(func=ast.Attribute(attr="from_pretrained" | "from_config" as name), keywords=words):
                refused = any(
                    word.arg == "trust_remote_code"
                    and isinstance(word.value, ast.Constant)
                    and word.value.value is False
                    for word in words
                )
                if (is_product and path not in READS_MODELS) or not (
                    refused or (name == "from_config" and not is_product)
                ):
                    yield f"{path}: {name}"


def test_a_models_folder_is_read_without_its_code() -> None:
    found: list[str] = []
    num_files = 0
    for package in (*PRODUCT, "tools", "examples", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            num_files += 1
            source = path.read_text()
            if LOADS.search(source):
                found += unsafe_loads(str(path.relative_to(ROOT)), ast.parse(source))
    assert num_files > 900
    assert found == []
    bad = "from transformers import AutoTokenizer\nAutoTokenizer.from_pretrained(f)\nAutoConfig.from_config(c)"
    good = "AutoTokenizer.from_pretrained(f, trust_remote_code=False)"
    assert list(unsafe_loads("baton/x.py", ast.parse(bad))) == [
        "baton/x.py: imports AutoTokenizer",
        "baton/x.py: from_pretrained",
        "baton/x.py: from_config",
    ]
    assert list(unsafe_loads("tests/x.py", ast.parse(bad))) == ["tests/x.py: from_pretrained"]
    assert list(unsafe_loads(READS_MODELS[0], ast.parse(bad.replace("f)", "f, trust_remote_code=None)")))) != []
    assert list(unsafe_loads(READS_MODELS[0], ast.parse(good))) == []


WRITE = ("deploy/say.py", "deploy/kubernetes/definition.py", "deploy/kubernetes/release_secrets.py", "baton/grammar.py")
"""Files that may write to standard output or make a console of rich's: the one place, sentences of the chart's hooks,
and what a child process says to its parent."""


def test_what_is_shown_goes_through_the_one_place_that_shows_no_commands() -> None:
    found = []
    for package in PRODUCT:
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            called = {name for name, _ in calls(tree_of(path))}
            found += [(name, each) for each in called & {"print", "sys.stdout.write", "Console"} if name not in WRITE]
            found += [(name, each) for each in called if each.endswith("from_markup")]
    assert found == []
    assert "sys.stdout.write" in {name for name, _ in calls(tree_of(ROOT / WRITE[0]))}


def test_the_redis_of_baton_up_is_its_users_alone() -> None:
    with EmbeddedRedis() as redis:
        socket = Path(redis.url.removeprefix("unix://"))
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
        assert redis.pid
        assert psutil.Process(redis.pid).net_connections("inet") == [], "it listens on no port"
