"""Limits: a bound on each, and relations that hold."""
from __future__ import annotations

import msgspec
import pytest

import flowengine as flow
from flowengine.config import BOUNDS, RELATIONS, WHOLE, Config, from_environment, make_config
from flowengine.errors import BadType, ConfigError, UsageError


def test_every_limit_has_bounds_and_a_unit():
    assert list(BOUNDS) == list(WHOLE)
    assert all(smaller in BOUNDS and larger in BOUNDS for smaller, _, larger, _ in RELATIONS)
    units = ("_s", "_bytes", "_max", "_fraction", "_kept", "_port")
    assert all(name.endswith(units) for name in WHOLE)


def test_given_limits_lie_over_the_defaults():
    config = make_config({"heartbeat_s": 1, "pipeline_tasks_max": 8})
    assert (config.heartbeat_s, config.pipeline_tasks_max, config.inline_bytes_max) == (1.0, 8, 65_536)
    assert isinstance(config.heartbeat_s, float)
    assert make_config(config) is config
    assert make_config() == make_config({}) == Config()


def test_survives_the_wire():
    config = make_config({"chunk_bytes": 1 << 20})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


@pytest.mark.parametrize(("given", "match"), [
    ({"suspect_after_s": 1.0}, "suspect_after_s=1.0 must be at least 4 x heartbeat_s=0.5"),
    ({"link_lost_after_s": 5}, "link_lost_after_s"), ({"restart_delay_s": 60}, "restart_delay_s_max"),
    ({"pipeline_tasks_max": 0}, "pipeline_tasks_max"), ({"heartbeat_s": float("nan")}, "heartbeat_s"),
    ({"heartbeat": 1}, "did you mean 'heartbeat_s'")])
def test_what_cannot_hold_is_refused(given, match):
    with pytest.raises(ConfigError, match=match) as info:
        make_config(given)
    assert isinstance(info.value, (UsageError, ValueError))


@pytest.mark.parametrize("given", [{"pipeline_tasks_max": 1.5}, {"heartbeat_s": "1"}, {"heartbeat_s": True}, "text", 3])
def test_wrong_types_are_refused(given):
    with pytest.raises(BadType):
        make_config(given)


def test_init_refuses_what_is_no_config():
    with pytest.raises(BadType, match="config must be a dict or a Config, not 5"):
        flow.init(config=5)


def test_bounds_hold_for_a_config_made_directly():
    with pytest.raises(ConfigError, match="pool_fraction"):
        Config(pool_fraction=2.0)


def test_environment():
    environ = {"FLOWENGINE_HEARTBEAT_S": "0.25", "FLOWENGINE_LOG_LINES_KEPT": "7", "PATH": "x"}
    environ["FLOWENGINE_COLOUR"] = "red"        # of a program around us
    assert from_environment(environ) == {"heartbeat_s": 0.25, "log_lines_kept": 7}
    assert make_config({**from_environment(environ), "heartbeat_s": 1.0}).heartbeat_s == 1.0


@pytest.mark.parametrize(("variable", "text", "match"), [
    ("FLOWENGINE_HEARTBEAT_S", "often", "must be a number, not 'often'"),
    ("FLOWENGINE_LOG_LINES_KEPT", "1.5", "whole number"), ("FLOWENGINE_HEARTBEAT_S", "0", "heartbeat_s"),
    ("FLOWENGINE_HEARTBEAT", "1", "did you mean 'heartbeat_s'"),
    ("FLOWENGINE_MAX_CHUNK_BYTES", "1", None), ("FLOWENGINE_INLINE_MAX_BYTES", "1", "inline_bytes_max")])
def test_environment_that_cannot_be_read_is_named(variable, text, match):
    if match is None:
        assert from_environment({variable: text}) == {}
        return
    with pytest.raises(ConfigError, match=match):
        from_environment({variable: text})
