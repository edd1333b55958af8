"""Connections to PostgreSQL, by an address that has a password: no error shows a part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from slipstream.errors import ConfigError

# A server that is gone is noticed after 25 s. By default, requests wait a quarter of an hour.
NOTICE_SERVER: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}


def postgres(address: str) -> tuple[type[Exception], Callable[[], Any]]:
    """The error of a server that does not answer, and what opens a connection to it.

    Raises:
        ConfigError: psycopg is missing; also from the connection, if the address is malformed.
    """
    try:
        import psycopg
        from psycopg.conninfo import conninfo_to_dict
        from psycopg.types.numeric import Int8Dumper
    except ImportError:
        raise ConfigError("PostgreSQL needs psycopg: pip install 'slipstream[postgres]'") from None

    def connect() -> Any:
        try:
            given = conninfo_to_dict(address)
            if _is_misread(given):
                raise psycopg.ProgrammingError
            settings: dict[str, Any] = {**NOTICE_SERVER, **given, "connect_timeout": 5}
            connection = psycopg.connect(autocommit=True, **settings)
        except psycopg.ProgrammingError:  # its text may have a part of the password
            raise ConfigError(
                "the address of the database is malformed; give postgresql://USER:PASSWORD@HOST/"
                "NAME, with each reserved character of the password as % and two digits"
            ) from None
        # By default a small number is a smallint, and sums of two overflow.
        connection.adapters.register_dumper(int, Int8Dumper)
        return connection

    return psycopg.OperationalError, connect


def shown_address(address: str) -> str:
    """Which database an address names; for the log, so without user and password.

    Call it once a connection was made: only then is it certain what of it is the password.
    """
    from psycopg.conninfo import conninfo_to_dict

    return _shown(conninfo_to_dict(address))


def _shown(given: Mapping[str, Any]) -> str:
    """What may be shown of an address.

    >>> _shown({"host": "db", "port": "5433", "dbname": "nlc", "user": "me", "password": "secret"})
    'PostgreSQL database nlc at db:5433'
    """
    place = ":".join(str(given[name]) for name in ("host", "port") if given.get(name))
    name = given.get("dbname", "of the default name")
    return f"PostgreSQL database {name}{f' at {place}' if place else ''}"


def _is_misread(given: Mapping[str, Any]) -> bool:
    """Whether a part of the password was taken for the host or the port, which errors name.

    >>> _is_misread({"host": "word@db"}), _is_misread({"host": "db,@socket", "port": "5432,"})
    (True, False)
    """
    hosts, ports = (str(given.get(name, "")).split(",") for name in ("host", "port"))
    # A first @ is that of a socket without a file.
    return any("@" in host[1:] for host in hosts) or not all(
        port.strip().isdecimal() for port in ports if port
    )
