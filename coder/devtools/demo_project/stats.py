"""Numbers about a list of numbers."""


def mean(values):
    """The arithmetic mean; 0 for an empty list."""
    return sum(values) / len(values)


def spread(values):
    """The largest value less the smallest."""
    ordered = sorted(values)
    return ordered[-1] - ordred[0]


def report(name, values):
    """One line about the values."""
    return f"{name}: mean {mean(values):.1f}, spread {spread(values)}"
