"""Everything a launcher or scheduler may say, and what is said back when it makes no sense."""

import socket
from pathlib import Path

import pytest

from slipstream.errors import LaunchError, SecretError
from slipstream.runtime.process.environment import (
    Environment,
    address_of,
    address_towards,
    is_loopback,
    read_secret,
)

TOGETHER = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SECRET = "a secret long enough"


def test_alone_when_nothing_is_set() -> None:
    alone = Environment.read({})
    assert alone == Environment()
    assert (alone.rank, alone.world_size, alone.one_host, alone.encrypt) == (0, 1, True, None)


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("RANK", "2", "rank", 2),
        ("WORLD_SIZE", "8", "world_size", 8),
        ("LOCAL_RANK", "3", "local_rank", 3),
        ("LOCAL_WORLD_SIZE", "2", "local_world_size", 2),
        ("MASTER_ADDR", "head.example", "master_addr", "head.example"),
        ("MASTER_PORT", "1234", "master_port", 1234),
        ("SLIPSTREAM_STORE_FD", "7", "store_fd", 7),
        ("TORCHELASTIC_USE_AGENT_STORE", "True", "agent_store", True),
        ("TORCHELASTIC_USE_AGENT_STORE", "False", "agent_store", False),
        ("TORCHELASTIC_RESTART_COUNT", "2", "attempt", 2),
        ("SLIPSTREAM_STRATEGY", "allreduce", "strategy", "allreduce"),
        ("SLIPSTREAM_SERVERS", "3", "servers", 3),
        ("SLIPSTREAM_SERVER_ADDRESSES", "tcp://a:1,tcp://b:2,", "server_addresses", None),
        ("SLIPSTREAM_SECRET", SECRET, "secret", SECRET.encode()),
        ("SLIPSTREAM_ENCRYPT", "0", "encrypt", False),
        ("SLIPSTREAM_ENCRYPT", "1", "encrypt", True),
        ("SLIPSTREAM_JOB", "night", "job", "night"),
        ("SLIPSTREAM_INTERFACE", "eth1", "interface", "eth1"),
        ("SLIPSTREAM_JSON", "out/x.json", "json", Path("out/x.json")),
        ("SLIPSTREAM_LOG", "run.jsonl", "log", Path("run.jsonl")),
        ("SLIPSTREAM_TENSORBOARD", "board", "tensorboard", Path("board")),
        ("SLIPSTREAM_PROMETHEUS", "9100", "prometheus", 9100),
        ("SLIPSTREAM_LAUNCHER", "77", "launcher", 77),
        ("SLIPSTREAM_NONFINITE", "refuse", "nonfinite", "refuse"),
    ],
)
def test_every_variable_reaches_its_field(
    variable: str, text: str, field: str, value: object
) -> None:
    env = Environment.read({**TOGETHER, variable: text})
    expected = ("tcp://a:1", "tcp://b:2") if field == "server_addresses" else value
    assert getattr(env, field) == expected


@pytest.mark.parametrize(
    ("variable", "field"),
    [
        ("LOCAL_WORLD_SIZE", "local_world_size"),
        ("SLIPSTREAM_STORE_FD", "store_fd"),
        ("SLIPSTREAM_STRATEGY", "strategy"),
        ("SLIPSTREAM_SERVERS", "servers"),
        ("SLIPSTREAM_JOB", "job"),
        ("SLIPSTREAM_INTERFACE", "interface"),
        ("SLIPSTREAM_JSON", "json"),
        ("SLIPSTREAM_LOG", "log"),
        ("SLIPSTREAM_TENSORBOARD", "tensorboard"),
        ("SLIPSTREAM_PROMETHEUS", "prometheus"),
        ("SLIPSTREAM_LAUNCHER", "launcher"),
    ],
)
def test_an_empty_variable_is_as_good_as_none(variable: str, field: str) -> None:
    assert getattr(Environment.read({variable: ""}), field) is None


@pytest.mark.parametrize(
    "variable",
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_PORT",
        "SLIPSTREAM_STORE_FD",
        "TORCHELASTIC_RESTART_COUNT",
        "SLIPSTREAM_SERVERS",
        "SLIPSTREAM_PROMETHEUS",
        "SLIPSTREAM_LAUNCHER",
    ],
)
@pytest.mark.parametrize("text", ["two", "2.5", "0x2", "-"])
def test_a_number_that_is_none_is_quoted(variable: str, text: str) -> None:
    with pytest.raises(LaunchError, match=rf"{variable}='{text}' is not a whole number"):
        Environment.read({**TOGETHER, variable: text})


@pytest.mark.parametrize(("rank", "world"), [("4", "4"), ("-1", "4"), ("0", "0"), ("1", "1")])
def test_a_rank_outside_the_world_is_refused(rank: str, world: str) -> None:
    with pytest.raises(LaunchError, match=f"RANK={rank} does not fit WORLD_SIZE={world}"):
        Environment.read({**TOGETHER, "RANK": rank, "WORLD_SIZE": world})


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_several_workers_need_a_meeting_place(missing: str) -> None:
    env = {key: text for key, text in TOGETHER.items() if key != missing}
    with pytest.raises(LaunchError, match="WORLD_SIZE=4 but MASTER_ADDR or MASTER_PORT is not set"):
        Environment.read(env)


@pytest.mark.parametrize("port", ["65536", "-1"])
def test_a_port_no_socket_can_have_is_refused(port: str) -> None:
    with pytest.raises(LaunchError, match=f"MASTER_PORT={port}"):
        Environment.read({**TOGETHER, "MASTER_PORT": port})


# ---- where to listen


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("10.0.0.7", False),
        ("head.example", False),
        ("0.0.0.0", False),
    ],
)
def test_loopback_is_told_from_other_hosts(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    assert Environment.read({**TOGETHER, "MASTER_ADDR": host}).one_host is loopback


def test_all_workers_on_one_host_stay_on_loopback() -> None:
    env = Environment.read({**TOGETHER, "LOCAL_WORLD_SIZE": "4"})
    assert env.one_host
    assert env.listen_host() == env.store_address == "127.0.0.1"
    assert not Environment.read({**TOGETHER, "LOCAL_WORLD_SIZE": "2"}).one_host
    several = Environment.read(TOGETHER)
    assert several.store_address == several.master_addr
    told = {**TOGETHER, "LOCAL_WORLD_SIZE": "4", "SLIPSTREAM_INTERFACE": "192.0.2.4"}
    assert Environment.read(told).listen_host() == "127.0.0.1"


def test_on_its_own_host_a_name_may_resolve_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Debian sets up /etc/hosts; the store listens where other hosts reach it."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    told = {**TOGETHER, "MASTER_ADDR": "node01", "SLIPSTREAM_INTERFACE": "192.0.2.4"}
    assert Environment.read(told).store_address == "192.0.2.4"
    agent = {**told, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert Environment.read(agent).store_address == "node01"
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "192.0.2.9")
    assert Environment.read(told).store_address == "node01"


def test_an_interface_of_a_job_that_meets_on_loopback_takes_a_secret() -> None:
    told = {**TOGETHER, "MASTER_ADDR": "localhost", "SLIPSTREAM_INTERFACE": "192.0.2.4"}
    env = Environment.read(told)
    assert (env.listen_host(), env.encrypts) == ("192.0.2.4", True)
    with pytest.raises(SecretError):
        env.with_secret()


def test_an_agents_store_takes_a_secret_on_one_host_too() -> None:
    told = {**TOGETHER, "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env = Environment.read(told)
    assert env.store_address == env.master_addr, "it is where the agent listens"
    with pytest.raises(SecretError, match=r"SLIPSTREAM_SECRET=\$\(openssl rand -hex 32\) torchrun"):
        env.with_secret()
    Environment.read({**told, "SLIPSTREAM_SECRET": SECRET}).with_secret()


def test_an_interface_wins_over_the_route() -> None:
    env = Environment.read({**TOGETHER, "SLIPSTREAM_INTERFACE": "127.0.0.9"})
    assert env.listen_host() == "127.0.0.9"


def test_the_route_decides_the_address_and_sends_nothing() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        nobody.bind(("127.0.0.1", 0))
        nobody.setblocking(False)
        port = nobody.getsockname()[1]
        assert address_towards("127.0.0.1", port) == "127.0.0.1"
        assert address_towards("localhost", 0) in ("127.0.0.1", "::1")
        with pytest.raises(BlockingIOError):
            nobody.recv(1)


def test_a_host_that_cannot_be_found_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> object:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(LaunchError, match=r"MASTER_ADDR=no\.host\.invalid.*SLIPSTREAM_INTERFACE"):
        address_towards("no.host.invalid", 1)


def test_interfaces_are_known_by_name_or_address() -> None:
    assert address_of("192.0.2.4") == "192.0.2.4"
    assert address_of("fe80::1") == "fe80::1"
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    assert address_of(loopback) == "127.0.0.1"
    with pytest.raises(LaunchError, match=rf"'nope0' has no IPv4 .* interfaces are .*{loopback}"):
        address_of("nope0")


# ---- the secret


def test_across_hosts_a_secret_is_required_and_the_message_says_how() -> None:
    env = Environment.read(TOGETHER)
    with pytest.raises(
        SecretError, match=r"MASTER_ADDR=10\.0\.0\.7 .*SLIPSTREAM_SECRET .*SLIPSTREAM_SECRET_FILE"
    ):
        env.with_secret()
    Environment.read({**TOGETHER, "SLIPSTREAM_SECRET": SECRET}).with_secret()
    Environment.read({**TOGETHER, "LOCAL_WORLD_SIZE": "4"}).with_secret()
    Environment.read({**TOGETHER, "MASTER_ADDR": "localhost"}).with_secret()


def test_a_secret_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    assert read_secret({"SLIPSTREAM_SECRET_FILE": str(file)}) == SECRET.encode()
    both = {"SLIPSTREAM_SECRET_FILE": str(file), "SLIPSTREAM_SECRET": "x" * 16}
    assert read_secret(both) == b"x" * 16
    assert read_secret({}) is None


def test_an_empty_secret_means_none(tmp_path: Path) -> None:
    """Schedulers' manifests set variables that have no value."""
    assert read_secret({"SLIPSTREAM_SECRET": ""}) is None
    assert read_secret({"SLIPSTREAM_SECRET": "", "SLIPSTREAM_SECRET_FILE": ""}) is None
    file = tmp_path / "secret"
    file.write_text(SECRET)
    both = {"SLIPSTREAM_SECRET": "", "SLIPSTREAM_SECRET_FILE": str(file)}
    assert read_secret(both) == SECRET.encode()
    with pytest.raises(SecretError, match=r"HOME is not set.* set SLIPSTREAM_SECRET to the same"):
        Environment.read({**TOGETHER, "SLIPSTREAM_SECRET": ""}).with_secret()


@pytest.mark.parametrize("text", ["", "short", "x" * 15])
def test_a_secret_that_can_be_guessed_is_refused(text: str, tmp_path: Path) -> None:
    if text:
        with pytest.raises(SecretError, match="shorter than 16"):
            read_secret({"SLIPSTREAM_SECRET": text})
    file = tmp_path / "secret"
    file.write_text(text + "\n")
    with pytest.raises(SecretError, match="shorter than 16"):
        read_secret({"SLIPSTREAM_SECRET_FILE": str(file)})


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for trouble in (tmp_path / "missing", tmp_path):
        with pytest.raises(SecretError, match=f"cannot read the secret file {trouble}: "):
            read_secret({"SLIPSTREAM_SECRET_FILE": str(trouble)})


def test_a_secret_file_of_random_bytes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(bytes(range(128, 160)))
    with pytest.raises(SecretError, match=f"cannot read the secret file {file}: .*text"):
        read_secret({"SLIPSTREAM_SECRET_FILE": str(file)})


@pytest.mark.parametrize(
    ("told", "encrypts"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        ({"MASTER_ADDR": "node7", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"MASTER_ADDR": "192.0.2.4"}, True),
        ({"MASTER_ADDR": "192.0.2.4", "SLIPSTREAM_ENCRYPT": "0"}, False),
    ],
)
def test_only_one_host_and_the_users_word_switch_encryption_off(
    told: dict[str, str], encrypts: bool
) -> None:
    env = Environment.read({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", **told})
    assert env.encrypts is encrypts


@pytest.mark.parametrize("again", ["SLIPSTREAM_INCARNATION", "TORCHELASTIC_RESTART_COUNT"])
def test_who_was_started_again(again: str) -> None:
    assert not Environment.read({}).started_again
    assert Environment.read({again: "1"}).started_again
