"""Markup escapes what is not markup; numbers and ticks say what they mean."""

from __future__ import annotations

from html import unescape
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harts.report.markup import Markup, number, share, tag
from harts.report.text import count, figure, short, ticks, with_unit

XML_TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), max_codepoint=0xFFFD)
)


@given(XML_TEXT, XML_TEXT)
def test_any_text_comes_back_out_of_an_element_and_an_attribute(text: str, value: str) -> None:
    element = ElementTree.fromstring(tag("p", text, title=value))
    assert (element.text or "") == text
    assert element.get("title") == value
    assert len(element) == 0


@given(st.text())
def test_whatever_a_file_holds_is_well_formed(text: str) -> None:
    ElementTree.fromstring(tag("p", text, title=text).encode("utf-8"))


def test_only_markup_stays_markup() -> None:
    assert tag("p", "<b>") == "<p>&lt;b&gt;</p>"
    assert tag("p", Markup("<b></b>")) == "<p><b></b></p>"
    assert unescape(tag("p", "a & b")) == "<p>a & b</p>"


def test_attribute_names_lose_underscores_and_none_is_left_out() -> None:
    assert tag("rect", class_="a", aria_label="b", x=1.50, y=None) == (
        '<rect class="a" aria-label="b" x="1.5"/>'
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (-0.0001, "0"), (12, "12"), (1 / 3, "0.333"), (100.0, "100")]
)
def test_coordinates_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_a_share_of_nothing_is_nothing() -> None:
    assert share(1, 0) == "0%"
    assert share(1, 8) == "12.5%"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10.0 k"),
        (64_687, "64.7 k"),
        (999_950, "1000 k"),
        (42_329_348, "42.3 M"),
        (2_000_000_000, "2.00 G"),
    ],
)
def test_short_numbers_keep_three_digits(value: float, text: str) -> None:
    assert short(value).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-6.69062, "−6.691"),
        (1e-5, "1.000e−05"),
        (19_231.2, "19,231"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_figures_keep_four_digits(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0048, "4.8 ms"),
        (1.0, "1 s"),
        (599.0, "599 s"),
        (600.0, "10 min"),
        (12_300.0, "3 h 25 min"),
    ],
)
def test_durations_are_in_the_unit_people_use(value: float, text: str) -> None:
    assert with_unit(value, "s").replace("\N{NO-BREAK SPACE}", " ") == text


def test_counts_are_grouped() -> None:
    assert count(42_329_348) == "42,329,348"


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9), st.integers(1, 8))
@example(360287971.0, 5.960464477539063e-08, 3)
def test_ticks_are_few_ascending_and_inside(low: float, width: float, most: int) -> None:
    high = low + width
    found = ticks(low, high, most)
    slack = 1e-9 * max(abs(low), abs(high), 1)
    assert len(found) <= most + 1
    assert found == sorted(found)
    assert all(low - slack <= at <= high + slack for at in found)
