"""The launcher with real processes. Workers are small scripts, so that a test takes moments."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from stage import (
    GRANDCHILD,
    LIMIT_S,
    PATIENT,
    READY,
    SLEEPER,
    STUBBORN,
    Stage,
    own_lines,
    runs,
    until,
)

from slipstream.errors import EXIT_PEER_FAILED
from slipstream.runtime.launch.process_group import OUTPUT_S

pytestmark = pytest.mark.process


def test_success_is_zero_and_silent(stage: Stage) -> None:
    assert stage.run("pass", workers=3) == (0, "", "")


@pytest.mark.parametrize("empty", [False, True])
def test_sets_of_strings_have_one_order_on_all_ranks(
    stage: Stage, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if empty:  # which means "random" to Python
        monkeypatch.setenv("PYTHONHASHSEED", "")
    code, out, _ = stage.run("print(hash('a'), flush=True)", workers=3)
    assert code == 0
    assert len({line.split()[-1] for line in out.splitlines()}) == 1, out


def test_failing_rank_is_named_and_the_rest_stopped(stage: Stage) -> None:
    failing = "if NAME == 'rank2':\n wait_for('rank0.pid'); wait_for('rank1.pid'); sys.exit(3)\n"
    code, _, err = stage.run(failing + SLEEPER, workers=3)
    assert code == 3
    assert err == "slipstream: rank 2 exited with code 3; the other ranks were stopped\n"
    assert stage.left_running == []


def test_the_rest_may_end_by_themselves(stage: Stage) -> None:
    worker = f"""
if NAME == "rank0":
    mark("left")
    sys.exit({EXIT_PEER_FAILED})
wait_for("left")
sys.exit(4)
"""
    code, _, err = stage.run(worker, limits=PATIENT)
    assert (code, own_lines(err)) == (
        4,
        ["slipstream: rank 1 exited with code 4; the other ranks ended with it"],
    )


def test_killed_worker(stage: Stage) -> None:
    stage.start(SLEEPER)
    os.kill(stage.pid("rank1"), signal.SIGKILL)
    code, _, err = stage.finish()
    assert code == 137
    assert err == "slipstream: rank 1 was killed by SIGKILL; the other ranks were stopped\n"
    assert stage.left_running == []


def test_worker_that_ignores_sigterm_is_killed(stage: Stage) -> None:
    worker = "if NAME == 'rank1':\n wait_for('rank0.pid'); sys.exit(1)\n" + STUBBORN
    assert stage.run(worker)[0] == 1
    assert stage.left_running == []


@pytest.mark.parametrize(
    ("signum", "code", "by"),
    [
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGTERM, 143, "SIGTERM"),
        (signal.SIGHUP, 129, "SIGHUP"),
    ],
)
def test_signal_to_the_launcher_ends_everything(
    stage: Stage, signum: signal.Signals, code: int, by: str
) -> None:
    stage.start(SLEEPER, servers=1, limits=PATIENT)
    stage.pid("rank0"), stage.pid("rank1"), stage.pid("server0")
    stage.send(signum)
    assert stage.finish() == (code, "", f"slipstream: stopped by {by}\n")
    assert stage.left_running == []


def test_workers_may_tidy_up_on_the_first_signal_and_are_killed_on_the_second(
    stage: Stage,
) -> None:
    tidy = "signal.signal(signal.SIGTERM, lambda *_: mark(f'{NAME}.asked'))\n" + SLEEPER
    stage.start(tidy, limits=PATIENT)
    stage.pid("rank0"), stage.pid("rank1")
    stage.send(signal.SIGINT)
    until((stage.folder / "rank0.asked").exists, "rank 0 to get SIGTERM")
    until((stage.folder / "rank1.asked").exists, "rank 1 to get SIGTERM")
    stage.send(signal.SIGINT)
    assert stage.finish()[0] == 130
    assert stage.left_running == []


BEGUN = 'os.write(int(os.environ["SLIPSTREAM_PRESENCE_FD"]), b"b")\n'
SAVES = """
try:
    mark(f"{NAME}.pid", os.getpid())
    forever()
except KeyboardInterrupt:
    mark(f"{NAME}.saved")
"""


def test_ctrl_c_runs_a_scripts_own_handler(stage: Stage) -> None:
    stage.start(BEGUN + SAVES, limits=PATIENT | {"interrupt_s": 600.0})
    stage.pid("rank0"), stage.pid("rank1")
    stage.send(signal.SIGINT)
    assert stage.finish() == (130, "", "slipstream: stopped by Ctrl-C\n")
    assert sorted(file.name for file in stage.folder.glob("*.saved")) == [
        "rank0.saved",
        "rank1.saved",
    ]
    assert stage.left_running == []


@pytest.mark.parametrize("again", [True, False])
def test_a_handler_that_hangs_is_ended(stage: Stage, again: bool) -> None:
    """At once by a second Ctrl-C, and else after the limit, by SIGTERM."""
    patient = PATIENT | {"interrupt_s": 600.0}
    stage.start(
        BEGUN + SAVES + "    forever()\n", limits=patient if again else {"interrupt_s": 0.2}
    )
    stage.pid("rank0"), stage.pid("rank1")
    stage.send(signal.SIGINT)
    for name in ("rank0.saved", "rank1.saved") if again else ():
        until((stage.folder / name).exists, f"{name}")
    if again:
        stage.send(signal.SIGINT)
    assert stage.finish() == (130, "", "slipstream: stopped by Ctrl-C\n")
    assert stage.left_running == []


def test_nohup_is_respected(stage: Stage) -> None:
    stage.launcher = subprocess.Popen(
        ["nohup", *stage.arguments(READY + "wait_for('go')")],
        env=os.environ | stage.remains.mark,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stage.pid("rank0"), stage.pid("rank1")
    stage.send(signal.SIGHUP)
    (stage.folder / "go").touch()
    assert stage.finish()[0] == 0


def test_killed_launcher_leaves_nothing(stage: Stage) -> None:
    stage.start(GRANDCHILD + STUBBORN, servers=1)
    names = ["rank0", "rank1", "server0", "child-of-rank0", "child-of-rank1"]
    assert all(runs(stage.pid(name)) for name in names)
    stage.send(signal.SIGKILL)
    until(lambda: not stage.left_running, "everything the launcher started to end")


@pytest.mark.parametrize("end", ["pass", "sys.exit(1)", "os.kill(os.getpid(), 9)"])
def test_grandchildren_go_with_their_worker(stage: Stage, end: str) -> None:
    both = "wait_for('child-of-rank0.pid'); wait_for('child-of-rank1.pid')\n"
    stage.run(GRANDCHILD + both + end)
    assert len(list(stage.folder.glob("child-of-*.pid"))) == 2
    assert stage.left_running == []


def test_output_comes_under_its_rank(stage: Stage) -> None:
    worker = """
print("hello from", NAME)
print("trouble in", NAME, file=sys.stderr)
"""
    code, out, err = stage.run(worker)
    assert code == 0
    assert sorted(out.splitlines()) == ["[rank 1] hello from rank1", "hello from rank0"]
    assert sorted(err.splitlines()) == ["[rank 1] trouble in rank1", "trouble in rank0"]


def test_a_last_line_without_its_end_gets_one(stage: Stage) -> None:
    _, out, _ = stage.run("if NAME != 'rank0': print('half a line', end='')")
    assert out == "[rank 1] half a line\n"


def test_lines_of_several_ranks_stay_whole(stage: Stage) -> None:
    talks = "if NAME != 'rank0':\n for i in range(2000): print(i, 'x' * 50)"
    lines = stage.run(talks, workers=4)[1].splitlines()
    assert len(lines) == 6000
    for rank in range(1, 4):
        mine = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert mine == [f"[rank {rank}] {i} {'x' * 50}" for i in range(2000)]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_rank_zeros_lines_stay_whole_among_those_of_others(stage: Stage, unbuffered: str) -> None:
    """Rank 0 writes to the same pipe as the launcher: blocks of lines, or each part of a line."""
    talks = """
import slipstream
with slipstream.init():
    mark(NAME)
    wait_for("rank0"); wait_for("rank1")
    for i in range(3000): print("line", i, "ends")
    for i in range(3000): print("error", i, "ends", file=sys.stderr)
"""
    code, out, err = stage.run(talks, env={"PYTHONUNBUFFERED": unbuffered})
    assert code == 0, err
    for text, word in ((out, "line"), (err, "error")):
        lines = [line for line in text.splitlines() if "ends" in line]
        expected = [f"{word} {i} ends" for i in range(3000)]
        assert [line for line in lines if not line.startswith("[")] == expected
        assert [line for line in lines if line.startswith("[")] == [
            f"[rank 1] {line}" for line in expected
        ]


def test_reader_that_goes_away_does_not_stop_the_job(stage: Stage) -> None:
    worker = """
if NAME == "rank1":
    wait_for("closed")
    for i in range(5000): print("x" * 50)
    mark("written")
"""
    stage.start(worker)
    assert stage.launcher is not None
    assert stage.launcher.stdout is not None
    stage.launcher.stdout.close()
    (stage.folder / "closed").touch()
    assert stage.launcher.wait(LIMIT_S) == 0
    assert (stage.folder / "written").exists()


# The worker can end, but not all of its lines fit into the pipe of the launcher's reader.
TALKS = "if NAME == 'rank1':\n for i in range(2000): print('x' * 49)\n" + READY


@pytest.mark.parametrize("reads", [True, False])
def test_lines_wait_for_a_slow_reader_until_ctrl_c(stage: Stage, reads: bool) -> None:
    stage.start(TALKS)
    assert stage.launcher is not None
    stage.pid("rank0"), stage.pid("rank1")
    until(lambda: not stage.left_running, "ranks to end")
    with pytest.raises(subprocess.TimeoutExpired):
        stage.launcher.wait(OUTPUT_S + 2.0)
    if reads:
        assert stage.finish() == (0, f"[rank 1] {'x' * 49}\n" * 2000, "")
    else:
        stage.send(signal.SIGINT)
        assert stage.launcher.wait(LIMIT_S) == 0  # that of every rank


def test_stdin_is_rank_zeros(stage: Stage) -> None:
    stage.start("print(repr(sys.stdin.read()))", stdin=subprocess.PIPE)
    code, out, _ = stage.finish("typed")
    assert (code, sorted(out.splitlines())) == (0, ["'typed'", "[rank 1] ''"])


def test_terminal_and_its_ctrl_c(stage: Stage) -> None:
    worker = "print(NAME, sys.stdout.isatty(), flush=True)\n" + SLEEPER
    arguments = stage.arguments(worker, limits=PATIENT)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(arguments[0], arguments, os.environ | stage.remains.mark)
    stage.pid("rank0"), stage.pid("rank1")
    os.write(terminal, b"\x03")
    shown = b""
    try:
        while more := os.read(terminal, 4096):
            shown += more
    except OSError:
        pass  # how Linux reports that the other side has closed
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    text = shown.decode()
    assert "rank0 True" in text
    assert "[rank 1] rank1 False" in text
    assert text.endswith("slipstream: stopped by Ctrl-C\r\n")
    assert "Traceback" not in text
    assert stage.left_running == []


def test_environment(stage: Stage) -> None:
    # In one write, short enough not to be cut: print may write a line and its end apart.
    worker = """
import json
wanted = ("RANK", "WORLD_SIZE", "MASTER", "OMP_", "SLIPSTREAM_")
told = {key: value for key, value in os.environ.items() if any(w in key for w in wanted)}
os.write(1, (json.dumps(told) + "\\n").encode())
"""
    code, out, _ = stage.run(worker, workers=3)
    lines = [line.removeprefix(f"[rank {n}] ") for line in out.splitlines() for n in (1, 2)]
    envs = {env["RANK"]: env for env in (json.loads(li) for li in lines if li.startswith("{"))}
    assert code == 0
    assert sorted(envs) == ["0", "1", "2"]
    for rank, env in envs.items():
        assert env["LOCAL_RANK"] == rank
        assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == "3"
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert int(env["OMP_NUM_THREADS"]) >= 1
        assert len(env["SLIPSTREAM_SECRET"]) == 64
        assert ("SLIPSTREAM_STORE_FD" in env) == (rank == "0")
    for shared in ("MASTER_PORT", "SLIPSTREAM_SECRET", "SLIPSTREAM_JOB", "SLIPSTREAM_LAUNCHER"):
        assert len({env[shared] for env in envs.values()}) == 1


def test_rank_zero_inherits_the_port(stage: Stage) -> None:
    """Bound, so nobody else gets it; it listens when rank 0 does."""
    worker = """
import socket
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if NAME == "rank0":
    listener = socket.socket(fileno=int(os.environ["SLIPSTREAM_STORE_FD"]))
    try:
        socket.create_connection(where)
    except ConnectionRefusedError:
        print("nobody listens", end=", ")
    listener.listen()
    mark("listens")
    link, _ = listener.accept()
    print(link.recv(100).decode())
else:
    wait_for("listens")
    socket.create_connection(where).sendall(b"met")
"""
    assert stage.run(worker) == (0, "nobody listens, met\n", "")


def test_torch_may_open_its_own_store_at_the_port(stage: Stage) -> None:
    worker = """
from torch import distributed
distributed.init_process_group("gloo")
mark(f"{NAME}.size", distributed.get_world_size())
distributed.destroy_process_group()
"""
    assert stage.run(worker)[0] == 0
    assert [(stage.folder / f"rank{rank}.size").read_text() for rank in range(2)] == ["2", "2"]


def test_prefix_and_environment_of_a_placement(stage: Stage) -> None:
    code, out, _ = stage.run(
        "print(os.environ['A'], os.environ['B'])",
        workers=1,
        prefix=("env", "A=before"),
        env={"B": "placed"},
    )
    assert (code, out) == (0, "before placed\n")


def test_prefix_that_is_not_there(stage: Stage) -> None:
    code, _, err = stage.run("pass", prefix=("no-such-program",))
    assert code == 1
    assert "LaunchError: cannot start 'no-such-program'" in err
    assert stage.left_running == []


def test_port_taken(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        script = stage.folder / "worker.py"
        script.write_text("raise SystemExit(5)")
        done = subprocess.run(
            [sys.executable, "-m", "slipstream", "run", f"--port={port}", str(script)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    assert done.returncode == 2
    assert done.stderr.startswith(f"slipstream: port {port} on 127.0.0.1 cannot be used")
    assert len(done.stderr.splitlines()) == 1


NEW_PIDS = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_a_process_that_gets_the_number_of_an_ended_worker_lives(stage: Stage, end: str) -> None:
    setting = "echo 300 > /proc/sys/kernel/ns_last_pid"
    possible = subprocess.run([*NEW_PIDS, "sh", "-c", setting], capture_output=True, check=False)
    if possible.returncode:
        pytest.skip("numbers of processes cannot be chosen here: it needs root, and Linux")
    worker = READY + "if NAME == 'rank0': wait_for('go')\n"
    script = Path(__file__).with_name("reused_number.py")
    ended = subprocess.run(
        [*NEW_PIDS, sys.executable, str(script), str(stage.folder), end, *stage.arguments(worker)],
        env=os.environ | stage.remains.mark,
        capture_output=True,
        text=True,
        timeout=60.0,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "lives\n"), ended.stderr
