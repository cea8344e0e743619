"""The files in `deploy/` and the server's command line agree: what they run is parsed, with their environment."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from certificate import make_certificate
from serving_processes import serving

from kvtools.cli.main import main
from kvtools.server import run
from kvtools.server.health import check_in_json
from kvtools.server.settings import Settings
from kvtools.server.workers import _AFTER_GRACE

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start the command line with an environment; gives the sources and settings the server would have had."""

    def start(arguments: list[str], environment: dict[str, str]) -> tuple[list[Any], Settings]:
        calls: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(run, "serve", lambda *given, **rest: calls.append(given) or 0)
            for name, value in environment.items():
                patch.setenv(name, value)
            assert main(arguments) == 0
        return calls[0][0], calls[0][1]

    return start


def described(name: str) -> list[str]:
    """The options of the environment that a file names."""
    return re.findall(r"KVTOOLS_SERVE_\w+", (DEPLOY / name).read_text())


def dockerfile() -> list[tuple[str, str]]:
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for line in lines if line.strip() for word, _, rest in [line.partition(" ")]]


def container() -> tuple[list[str], dict[str, str]]:
    """The entry point of the image, without its program, and its environment."""
    (entry,) = (json.loads(rest) for word, rest in dockerfile() if word == "ENTRYPOINT")
    assert entry[0] == "kvtools"
    (environment,) = (
        dict(item.split("=", 1) for item in shlex.split(rest)) for word, rest in dockerfile() if word == "ENV"
    )
    return entry[1:], environment


def test_there_are_three_files_and_no_other_option_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(path.name for path in DEPLOY.iterdir())
    assert names == ["Dockerfile", "kubernetes.yaml", "kvtools-serve.service"]
    assert main(["serve", "--help"]) == 0
    help_text = capsys.readouterr().out
    for name in names:
        for option in described(name):
            assert option in help_text


def test_the_container(started: Any) -> None:
    entry, environment = container()
    _, settings = started([*entry, "/models/ctr", "--poll", "10"], environment)
    assert (settings.host, settings.port, settings.poll) == ("0.0.0.0", Settings().port, 10)
    words = dict(dockerfile())
    (check,) = re.findall(r"CMD (\[.*\])", words["HEALTHCHECK"])
    program = json.loads(check)
    assert program[:2] == ["python", "-c"]
    compile(program[2], "HEALTHCHECK", "exec")
    assert f"'KVTOOLS_SERVE_PORT', {settings.port})" in program[2] and "/readyz" in program[2]
    assert str(settings.port) in words["EXPOSE"].split()
    extras = re.search(r'"/source\[(.*?)\]"', (DEPLOY / "Dockerfile").read_text())
    assert extras
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    for extra in extras[1].split(","):
        assert re.search(rf"^{extra} = \[", project, re.M)
    user = words["USER"]
    made = next(rest for word, rest in dockerfile() if word == "RUN" and "useradd" in rest)
    assert f"--uid {user} " in made, "a number, or Kubernetes does not know that it is not root"
    assert made.endswith(environment["KVTOOLS_CACHE_DIR"]), "who has no home has a cache"


@pytest.mark.parametrize("tls", [False, True])
def test_the_health_check_of_the_container_asks_as_the_server_answers(
    tls: bool, tmp_path: Path, sample_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("grpc_health")
    (check,) = re.findall(r"CMD (\[.*\])", dict(dockerfile())["HEALTHCHECK"])
    command = [sys.executable, *json.loads(check)[1:]]
    if tls:
        for name, file in zip(("CERT", "KEY"), make_certificate(tmp_path), strict=True):
            monkeypatch.setenv(f"KVTOOLS_SERVE_TLS_{name}", str(file))
    with serving(sample_path) as ports:
        monkeypatch.setenv("KVTOOLS_SERVE_PORT", str(ports.http))
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0, "nobody is there"


def test_the_unit(started: Any) -> None:
    text = (DEPLOY / "kvtools-serve.service").read_text()
    said = dict(re.findall(r"^(\w+)=(.*)$", text, re.M))
    given = dict(re.findall(r"^#   (\w+)=(.*)$", text, re.M))  # the example of the file of the environment
    program, *arguments = said["ExecStart"].split()
    assert Path(program).name == "kvtools" and arguments[-1] == "$MODELS"
    models = given.pop("MODELS").split()
    name, _, cache = said["Environment"].partition("=")
    sources, settings = started([*arguments[:-1], *models], {**given, name: cache})
    assert [(source.name, source.path) for source in sources] == [
        ("ctr", "/srv/models/ctr"),
        ("cvr", "/srv/models/cvr"),
    ]
    assert (settings.poll, settings.workers) == (10, 4)
    assert float(said["TimeoutStopSec"]) > settings.grace + _AFTER_GRACE
    assert (name, cache) == ("KVTOOLS_CACHE_DIR", f"/var/cache/{said['CacheDirectory']}")
    assert int(said["LimitNOFILE"]) > settings.max_connections * 3 + 512


def test_the_manifest(started: Any) -> None:
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    assert [each["kind"] for each in (deployment, service)] == ["Deployment", "Service"]
    pod = deployment["spec"]["template"]["spec"]
    (serving,) = pod["containers"]
    entry, environment = container()
    environment |= {item["name"]: item["value"] for item in serving["env"]}
    if pod.get("enableServiceLinks", True):  # what a pod gets that begins when the service is there
        link = service["metadata"]["name"].upper().replace("-", "_")
        environment |= {f"{link}_PORT": "tcp://10.0.0.1:8501", f"{link}_SERVICE_HOST": "10.0.0.1"}
    (source,), settings = started([*entry, *serving["args"]], environment)
    mounts = {mount["mountPath"]: mount for mount in serving["volumeMounts"]}
    assert str(Path(source.path).parent) in mounts and settings.wait
    assert settings.host == "0.0.0.0" and settings.workers == 2
    ports = {port["name"]: port["containerPort"] for port in serving["ports"]}
    assert ports == {"http": settings.port, "grpc": settings.grpc_port}
    words = dict(dockerfile())
    assert {str(port) for port in ports.values()} == set(words["EXPOSE"].split())
    for kind, path in {"startup": "/warmz", "readiness": "/readyz", "liveness": "/livez"}.items():
        probe = serving[f"{kind}Probe"]["httpGet"]
        assert probe == {"path": path, "port": "http"}
        from kvtools.server.catalog import Catalog

        assert check_in_json(Catalog(), path) is not None
    program, seconds = serving["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert pod["terminationGracePeriodSeconds"] > float(seconds) + settings.grace + _AFTER_GRACE
    assert serving["securityContext"]["readOnlyRootFilesystem"]
    assert {environment["KVTOOLS_CACHE_DIR"], "/tmp"} < mounts.keys()
    assert {mount["name"] for mount in mounts.values()} == {volume["name"] for volume in pod["volumes"]}
    assert service["spec"]["ports"] == [
        {"name": name, "port": port, "targetPort": name} for name, port in ports.items()
    ]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert labels == service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
