"""How reports write numbers: thousands separators, units, three digits where that is enough."""

from __future__ import annotations

import math


def count(value: float) -> str:
    """A whole number: `42,329,348`."""
    return f"{value:,.0f}"


def short(value: float) -> str:
    """Three digits and a prefix: `42.3 M`; whole numbers below 10,000 in full."""
    size = abs(value)
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= factor * (10 if prefix == "k" else 1):
            scaled = value / factor
            digits = max(0, 3 - len(str(int(abs(scaled)))))
            return f"{scaled:.{digits}f}\N{NO-BREAK SPACE}{prefix}"
    return count(value) if float(value).is_integer() else f"{value:.3g}"


def counted(value: int, one: str, many: str | None = None) -> str:
    """`1 slot`, `2 slots`."""
    return f"{count(value)} {one if value == 1 else many or one + 's'}"


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal."""
    return f"{100 * fraction:.1f}\N{NO-BREAK SPACE}%"


def times(factor: float) -> str:
    """A ratio: `6.22×`."""
    return f"{factor:,.2f}×"


def seconds(value: float) -> str:
    """A duration: three digits of ms or s, whole minutes from ten minutes on."""
    if value >= 600:
        minutes = round(value / 60)
        return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    amount, unit = (f"{value * 1e3:.3g}", "ms") if value < 1 else (f"{value:,.3g}", "s")
    return f"{amount}\N{NO-BREAK SPACE}{unit}"


def figure(value: float) -> str:
    """Any measured number: 4 digits, grouped when large, scientific when far from 1."""
    if not math.isfinite(value):
        return str(value)
    if value and (abs(value) < 1e-3 or abs(value) >= 1e12):
        text = f"{value:.3e}"
    elif float(value).is_integer() or abs(value) >= 1e4:
        text = count(value)
    else:
        text = f"{value:,.4g}"
    return text.replace("-", "\N{MINUS SIGN}")


def with_unit(value: float, unit: str) -> str:
    """A measured number and its unit; seconds as a duration."""
    if unit == "s" and math.isfinite(value):
        return seconds(value)
    return f"{figure(value)}\N{NO-BREAK SPACE}{unit}" if unit else figure(value)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers in [low, high], a step of 1, 2 or 5 times a power of ten, `most` or fewer.

    One number where floats hardly tell low from high.
    """
    if not high - low > 1e-12 * max(abs(low), abs(high)):
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / max(1, most)))
    step = next((step * k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= most), step * 20)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]
