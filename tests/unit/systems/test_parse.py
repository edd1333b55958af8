"""Text from command lines and environments: read, never run."""

import builtins
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import vector

from slipstream.codecs import Above, Dense
from slipstream.errors import ConfigError, UnknownStrategy
from slipstream.methods import PartialExchange
from slipstream.plan import Plan
from slipstream.routes import Collective, Links
from slipstream.schedules import AfterBackward, Priority, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import SYSTEMS, parse
from slipstream.topologies import Mesh, Sharded
from slipstream.types import Cluster
from slipstream.updates import Add, Update, UserSteps


def planned(strategy: Strategy) -> Plan:
    specs = [vector("w", 5000, order=0), vector("b", 4, order=1, role="buffer")]
    return strategy.plan(specs, Cluster(2, 1))


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_a_bare_name_is_the_system_as_it_comes(name: str) -> None:
    for text in (name, f"{name}()", f"  {name} \n"):
        assert parse(text).name == name
        assert parse(text) == SYSTEMS[name]()
        assert planned(parse(text)) == planned(SYSTEMS[name]())


def test_arguments_reach_the_system() -> None:
    assert parse("push_pull").rounds.schedule == WaitFree()
    assert parse("push_pull(overlap=False)").rounds.schedule == AfterBackward()
    chosen = parse("push_pull(update='server', wire=\"bfloat16\", chunk_bytes=4096)")
    assert chosen.rounds.update.holder_applies
    assert (chosen.rounds.schedule, chosen.rounds.chunk_bytes) == (Priority(), 4096)
    (route,) = planned(chosen).routes
    assert (route.topology, route.up, route.down) == (Sharded(), Dense("bfloat16"), Dense())


def test_gradients_come_back_in_the_wire_format_they_went() -> None:
    (route,) = planned(parse("push_pull(wire='float16')")).routes
    assert (route.up, route.down) == (Dense("float16"), Dense("float16"))


def test_allreduce_sends_buffers_between_workers() -> None:
    parameters, buffers = planned(parse("allreduce(wire='bfloat16')")).routes
    assert (parameters.over, parameters.up) == (Collective(), Dense("bfloat16"))
    assert (buffers.over, buffers.up, buffers.topology) == (Links(), Dense(), Mesh())


def test_ako_is_slices_within_reach() -> None:
    plan = planned(parse("ako(partitions=3, staleness=7, schedule='same', rate='8mbit')"))
    assert plan.partial_exchange == PartialExchange(3, 7, bytes_s=1e6, same_for_all=True)
    default = planned(parse("ako")).partial_exchange
    assert default == PartialExchange(staleness=4 * 2)


def test_ako_may_also_hold_back_small_entries_and_grow() -> None:
    rule = planned(parse("ako(delta=0.5, growth='sqrt', warm_steps=9)")).partial_exchange
    assert rule is not None
    assert rule.held_back == Above(0.5, decay="constant")
    assert (rule.growth, rule.warm_steps) == ("sqrt", 9)


def test_a_bound_for_congested_links_needs_to_know_which_are() -> None:
    for half in ("congested_delta='99%'", "congested_below='50mbit'"):
        with pytest.raises(ConfigError, match="belong together"):
            parse(f"parameter_flow({half})")
    plan = planned(parse("parameter_flow(congested_delta=0.5, congested_below='8mbit')"))
    assert plan.congested_below == 1e6
    assert planned(parse("parameter_flow()")).congested_below is None


def test_what_parameter_flow_lets_travel() -> None:
    gradients, steps = parse("parameter_flow()"), parse("parameter_flow(payload='update')")
    assert gradients.rounds.update.inner.travels == "gradients"
    assert steps.rounds.update == Update(UserSteps(), Add("worker"))
    assert steps.rounds.schedule == AfterBackward()
    with pytest.raises(ConfigError, match="payload='weights'"):
        parse("parameter_flow(payload='weights')")


@pytest.mark.parametrize(
    "wrong",
    ["schedule='other'", "partitions=0", "partitions='many'", "staleness=-1", "growth='fast'"],
)
def test_ako_refuses_what_makes_no_sense(wrong: str) -> None:
    with pytest.raises(ConfigError):
        parse(f"ako({wrong})")


def test_all_to_all_is_a_mesh_over_links() -> None:
    (route,) = planned(parse("all_to_all(wire='float16')")).routes
    assert (route.topology, route.over, route.up) == (Mesh(), Links(), Dense("float16"))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("pushpull", "did you mean 'push_pull'"),
        ("all_reduce", "did you mean 'allreduce'"),
        ("PUSH_PULL", f"there are {', '.join(sorted(SYSTEMS))}"),
        ("zzz(overlap=True)", "no strategy 'zzz'"),
    ],
)
def test_an_unknown_name_lists_what_there_is(text: str, hint: str) -> None:
    with pytest.raises(UnknownStrategy, match=hint):
        parse(text)


def test_an_unknown_argument_lists_what_is_taken() -> None:
    with pytest.raises(UnknownStrategy, match=r"does not take lr, speed: it takes overlap, update"):
        parse("push_pull(speed=3, lr=1)")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "push_pull(",
        "push_pull(False)",
        "push_pull(*[False])",
        "push_pull(**{'overlap': False})",
        "push_pull(overlap=1 + 1)",
        "push_pull(overlap=not True)",
        "push_pull(overlap=overlap)",
        "push_pull(overlap=f'{1}')",
        "push_pull(overlap={[]: 1})",
        "push_pull(overlap=True)(overlap=True)",
        "push_pull(overlap=True, overlap=False)",
        "push_pull; push_pull",
        "push_pull = 1",
        "systems.push_pull",
        "systems.push_pull()",
        "lambda: 1",
        "'push_pull'",
        "push\0pull",
        "(" * 500,
        "-" * 100_000 + "1",
        "push_pull(overlap=" + "[" * 500 + "]" * 500 + ")",
    ],
)
def test_anything_but_a_name_with_literal_keywords_is_refused(text: str) -> None:
    with pytest.raises(UnknownStrategy, match="cannot read strategy"):
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "push_pull(overlap=__import__('slipstream_was_here'))",
        "__import__('slipstream_was_here')",
        "push_pull(overlap=(lambda: print('ran'))())",
        "push_pull(overlap=[print('ran') for _ in [1]])",
        "print('ran')",
    ],
)
def test_text_is_never_run(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = builtins.__import__

    def guarded(name: str, *args: object, **kwargs: object) -> object:
        assert name != "slipstream_was_here", "the text was run"
        return genuine(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", guarded)
    with pytest.raises(UnknownStrategy):
        parse(text)
    assert capsys.readouterr().out == ""


@given(st.text(max_size=40) | st.text("push_l(){}[]*=,'\"0123eFals ", max_size=40))
def test_no_text_gives_anything_but_a_strategy_or_its_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(text), Strategy)


@pytest.mark.parametrize(
    "text",
    [
        "push_pull(wire='int3')",
        "push_pull(wire=[])",
        "allreduce(wire='fp16')",
        "all_to_all(wire=None)",
        "push_pull(update='everywhere')",
        "push_pull(chunk_bytes=0)",
        "push_pull(chunk_bytes='2 MiB')",
        "allreduce(bucket_bytes=-1)",
        "one_bit(chunk_bytes=-1)",
    ],
)
def test_values_no_system_can_work_with_are_refused_at_once(text: str) -> None:
    with pytest.raises(ConfigError, match=r"wire|update|chunk_bytes"):
        parse(text)
