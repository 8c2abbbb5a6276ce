"""What is written for Slurm and KubeRay: what they take, with every word where it belongs."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from paceline import cli

SCHEMA = json.loads(Path(__file__).with_name("rayjob_schema.json").read_text())
IMAGE = "registry.example/train@sha256:0a"
ODD = ["--lr", "0.1", "$HOME `id`", "'; reboot #", '"\\', "a: {b}", "%d", "#SBATCH --uid=0", "größe 🚲", ""]


def written(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    assert cli.answer(["launch", *tokens]) == 0
    return capsys.readouterr().out


def slurm(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[dict[str, str], str]:
    """The options of a batch script and its text, which bash can read."""
    text = written(capsys, "--emit", "slurm", *tokens)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    options = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (option.partition("=") for option in options)}, text


def kuberay(capsys: pytest.CaptureFixture[str], *tokens: str) -> dict[str, Any]:
    """What a manifest that Kubernetes would take wants."""
    document = yaml.safe_load(written(capsys, "--emit", "kuberay", "--image", IMAGE, *tokens))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    return document["spec"]


def test_a_batch_script_asks_for_what_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    options, text = slurm(
        capsys,
        *("-n", "4", "-m", "4", "--nodes", "2", "--cpus", "3", "--gpus", "1", "--time", "1-02:03:04"),
        *("--partition", "long,gpu", "--name", "night-7", "train.py"),
    )

    assert options == {
        "job-name": "night-7",
        "nodes": "2",
        "ntasks": "4",
        "cpus-per-task": "3",
        "gpus-per-task": "1",
        "time": "1-02:03:04",
        "partition": "long,gpu",
        "output": "%x-%j.out",
        "open-mode": "append",
        "requeue": "",
        "signal": "TERM@60",
    }
    assert "\nexport PACELINE_SERVERS=node:2\n" in text
    assert "\nexport OMP_NUM_THREADS=3\n" in text


@pytest.mark.parametrize(
    ("nodes", "servers", "where", "tasks"),
    [(1, 3, "first:3", 4), (2, 2, "node:1", 4), (2, 3, "ranks:3", 7), (4, 1, "ranks:1", 5)],
)
def test_servers_are_beside_ranks_where_that_comes_out_even(
    nodes: int, servers: int, where: str, tasks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options, text = slurm(capsys, "-n", "4", "-m", str(servers), "--nodes", str(nodes), "train.py")

    assert f"\nexport PACELINE_SERVERS={where}\n" in text
    assert (options["ntasks"], "distribution" in options) == (str(tasks), where.startswith("ranks"))


def test_a_manifest_has_room_for_all_and_admits_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    spec = kuberay(
        capsys, "-n", "5", "-m", "3", "--nodes", "2", "--cpus", "2", "--gpus", "1", "--time", "00:10:00", "Big_run.py"
    )
    cluster = spec["rayClusterSpec"]
    [nodes] = cluster["workerGroupSpecs"]
    [container] = nodes["template"]["spec"]["containers"]

    assert spec["activeDeadlineSeconds"] == 600
    assert nodes["replicas"] == nodes["minReplicas"] == nodes["maxReplicas"] == 2
    assert container["image"] == IMAGE
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "20Gi", "nvidia.com/gpu": "3"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert spec["entrypoint"] == (
        "paceline run --engine ray --address auto --workers 5 --servers 3 --worker-cpus 2 --worker-gpus 1 Big_run.py"
    )


def test_the_command_of_a_manifest_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    spec = kuberay(capsys, "-n", "3", "-m", "2", "--cpus", "2", "--gpus", "1", "train.py", "-n", "9")

    options, script = cli.split_at_script(shlex.split(spec["entrypoint"])[1:])
    command, bound, _ = cli.app.parse_args([*options, cli.END_OF_OPTIONS, *script], exit_on_error=False)

    assert command is cli.run
    assert bound.arguments["engine"] == "ray"
    assert (bound.arguments["workers"], bound.arguments["servers"]) == ("3", 2)
    assert (str(bound.arguments["script"]), bound.arguments["args"]) == ("train.py", ("-n", "9"))


def test_every_argument_arrives_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    _, text = slurm(capsys, "my train.py", *ODD)
    spec = kuberay(capsys, "my train.py", *ODD)

    assert shlex.split(text.splitlines()[-1])[-len(ODD) - 2 :] == ["python", "my train.py", *ODD]
    assert shlex.split(spec["entrypoint"])[-len(ODD) - 1 :] == ["my train.py", *ODD]


def test_it_is_written_to_a_new_file_and_to_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.sbatch"
    tokens = ["launch", "--emit", "slurm", "--out", str(path), "train.py"]

    assert cli.answer(tokens) == 0
    assert capsys.readouterr() == ("", f"paceline: {path} is written; look at it, then start it: sbatch {path}\n")
    text = path.read_text()
    assert text == written(capsys, "--emit", "slurm", "train.py")
    assert cli.answer(tokens) == 2
    assert "which is there already" in capsys.readouterr().err
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["--name", "a\nb", "a.py"], "--name is 'a\\nb', expected small letters"),
        (["--name=-a", "a.py"], "--name is '-a'"),
        (["--name", "A_b", "a.py"], "--name is 'A_b'"),
        (["--name", "a" * 48, "a.py"], "at most 47"),
        ([""], "the script has no name"),
        (["--", "-a.py"], "would be taken for an option: write ./-a.py"),
        (["a.py", "one\ntwo"], "'one\\ntwo' has line ends"),
        (["a.py\u2028#SBATCH"], "has line ends"),
        (["--partition", "a b", "a.py"], "--partition is 'a b'"),
        (["--partition=--uid", "a.py"], "--partition is '--uid'"),
        (["--time", "90 minutes", "a.py"], "--time is '90 minutes', expected HH:MM:SS"),
        (["--time", "00:00:00", "a.py"], "--time in seconds must be at least 1, got 0"),
        (["--nodes", "3", "a.py"], "--nodes is 3 and --workers 2: a node would have no worker"),
        (["-n", "0", "a.py"], "--workers must be at least 1, got 0"),
        (["-m", "0", "a.py"], "--servers must be at least 1, got 0"),
        (["--gpus=-1", "a.py"], "--gpus must be at least 0, got -1"),
        (["--image", "a", "a.py"], "--image is for --emit kuberay"),
        (["--out", "/proc/1/none/a", "a.py"], "which cannot be written: No such file or directory"),
        (["--emit", "kuberay", "a.py"], "--emit kuberay needs --image"),
        (["--emit", "kuberay", "--image", "a\nb", "a.py"], "--image is 'a\\nb'"),
        (["--emit", "kuberay", "--image", "a", "--partition", "b", "a.py"], "--partition is for --emit slurm"),
        (["--emit", "nomad", "a.py"], "slurm"),
    ],
)
def test_what_makes_no_sense_is_refused(tokens: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    emit = [] if "--emit" in tokens else ["--emit", "slurm"]

    assert cli.answer(["launch", *emit, *tokens]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
