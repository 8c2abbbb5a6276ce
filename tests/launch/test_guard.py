"""The process that cleans up after the launcher."""

import os
import subprocess
from pathlib import Path

from tests.launch.launching import wait_gone

from paceline.launch.guard import LIFE, Guard, clear, follow_orders, remove_abandoned


def start_sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "1000"], start_new_session=True)


def test_orders_are_followed() -> None:
    groups = ["watch 1\n", "watch 2\n", "forget 1\n", "forget 9\n"]
    processes = ["watch-process 2\n", "watch-process 3\n", "forget-process 2\n"]
    assert follow_orders([*groups, *processes]) == ({2}, {3})


def test_it_kills_what_it_still_watches_and_spares_the_rest(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    guard = Guard(run_dir, temporary=True)
    with start_sleeper() as watched, start_sleeper() as forgotten:
        guard.watch(watched.pid)
        guard.watch(forgotten.pid)
        guard.forget(forgotten.pid)

        guard.dismiss(timeout_s=30.0)

        assert watched.wait(120) == -9
        assert forgotten.poll() is None
        forgotten.kill()
    assert not run_dir.exists()


def test_a_run_goes_on_without_its_guard(tmp_path: Path) -> None:
    guard = Guard(tmp_path, temporary=False)
    os.kill(guard.pid, 9)
    assert wait_gone({guard.pid}, 30.0) == set()

    guard.watch(1)
    guard.dismiss(timeout_s=30.0)


def test_clearing_a_kept_directory_takes_secrets_sockets_and_addresses(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "of-the-script").mkdir()
    ours = ("token", "token.previous", "keys/worker-0.key", "keys/any.pem", "keys/revoked", "called.off")
    kept = {"cluster.json", "tokenizer.json", "tokens.bin", "mesh.off"}
    found = ("server-0.address", "server-0.claim-1", "server-0.home-0", "server-0.sock", "worker-0.life")
    for name in (*ours, *found, *kept):
        (tmp_path / name).touch()

    clear(tmp_path, temporary=False)

    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")}
    assert left == kept | {"keys", "keys/of-the-script"}, "what a script keeps in its run directory is its own"


def test_folders_whose_guard_was_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    alive, dead, other, mine = (tmp_path / name for name in ("paceline-a", "paceline-b", "paceline-c", "elsewhere"))
    for folder in (alive, dead, other, mine):
        folder.mkdir(mode=0o700)
    (other / "notes").touch()
    guards = [Guard(folder, temporary=True) for folder in (alive, dead, mine)]
    for guard in guards[1:]:
        os.kill(guard.pid, 9)
        assert wait_gone({guard.pid}, 30.0) == set()
    (tmp_path / "paceline-d").mkdir()
    (tmp_path / "paceline-d" / LIFE).write_text("another machine")

    remove_abandoned(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"paceline-a", "paceline-c", "paceline-d", "elsewhere"}
    for guard in guards:
        guard.dismiss(timeout_s=30.0)
