"""The forms in which an interval may be given, in `SWEEPGRAD_AUTO_SWEEP` and to `sweeper.start`."""

import math

import pytest

from sweepgrad.config import AUTO_SWEEP, DEFAULT_INTERVAL, auto_sweep_interval, parse_interval
from sweepgrad.errors import ArgumentError

WEEK = 7 * 24 * 3600


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0.5", 0.5),
        ("5", 5.0),
        ("5.", 5.0),
        (".25", 0.25),
        ("007", 7.0),
        ("500ms", 0.5),
        ("2s", 2.0),
        ("1m", 60.0),
        ("0.1m", 6.0),
        ("250MS", 0.25),
        ("3 s", 3.0),
        ("  2s\n", 2.0),
        ("\t1.5 ms ", 0.0015),
        ("on", DEFAULT_INTERVAL),
        (" ON ", DEFAULT_INTERVAL),
        ("604800", WEEK),
        ("10080m", WEEK),
        (0.25, 0.25),
        (3, 3.0),
        (WEEK, WEEK),
    ],
)
def test_accepted(value, seconds):
    assert parse_interval(value, subject="interval") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("value", ["", "   ", "off", "OFF", " Off\t", "0", "0.0", ".0", "0ms", "0 m", 0, 0.0, -0.0])
def test_off(value):
    assert parse_interval(value, subject="interval") is None


@pytest.mark.parametrize(
    "value",
    [
        "-1",
        "-0.5s",
        "+1",
        "1e3",
        "1e-3s",
        "nan",
        "inf",
        "infinity",
        "1h",
        "1sec",
        "1ms s",
        "1 2",
        "1,5",
        "1_000",
        "1..5",
        ".",
        "s",
        "ms",
        "true",
        "yes",
        "none",
        "0x10",
        "\u0663",  # a digit in another script
        "\u0661s",
        "1\uff4d",  # a full-width m
        "\u00bd",
        "604800.1",
        "604801",
        "10081m",
        "9" * 400,
        -1,
        -0.001,
        math.nan,
        math.inf,
        -math.inf,
        WEEK + 1,
        True,
        False,
        None,
        b"1",
        [1],
        1j,
    ],
    ids=repr,
)
def test_refused(value):
    with pytest.raises(ArgumentError) as caught:
        parse_interval(value, subject="SOME_SETTING")
    assert str(caught.value).startswith(
        f"`SOME_SETTING` is {value!r}; accepted are seconds (`0.5`, `5`), a number with"
    )
    assert str(caught.value).endswith("up to a week")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("value", "seconds"), [(None, None), ("", None), ("off", None), ("2s", 2.0), ("on", 1.0)])
def test_setting_comes_from_the_environment(monkeypatch, value, seconds):
    if value is None:
        monkeypatch.delenv(AUTO_SWEEP, raising=False)
    else:
        monkeypatch.setenv(AUTO_SWEEP, value)
    assert auto_sweep_interval() == seconds


def test_wrong_setting_is_named(monkeypatch):
    monkeypatch.setenv(AUTO_SWEEP, "often")
    with pytest.raises(ArgumentError, match="`SWEEPGRAD_AUTO_SWEEP` is 'often'"):
        auto_sweep_interval()
